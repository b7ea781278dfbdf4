#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def even_numbers(xs):
    return [x for x in xs if x % 2 == 0]
SOLUTION
