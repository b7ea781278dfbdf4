#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def reverse_list(xs):
    return xs[::-1]
SOLUTION
