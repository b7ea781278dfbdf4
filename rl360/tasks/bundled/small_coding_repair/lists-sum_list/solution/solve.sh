#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def sum_list(xs):
    return sum(xs)
SOLUTION
