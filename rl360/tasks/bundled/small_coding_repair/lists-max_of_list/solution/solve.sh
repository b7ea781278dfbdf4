#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def max_of_list(xs):
    return max(xs)
SOLUTION
