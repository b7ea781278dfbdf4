#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def min_of_three(a, b, c):
    return min(a, b, c)
SOLUTION
