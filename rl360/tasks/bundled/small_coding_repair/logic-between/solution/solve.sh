#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def between(x, low, high):
    return low <= x <= high
SOLUTION
