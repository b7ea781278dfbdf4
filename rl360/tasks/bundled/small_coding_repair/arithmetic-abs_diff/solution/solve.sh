#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def abs_diff(a, b):
    return abs(a - b)
SOLUTION
