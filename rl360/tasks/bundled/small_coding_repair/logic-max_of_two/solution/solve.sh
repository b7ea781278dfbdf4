#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def max_of_two(a, b):
    return max(a, b)
SOLUTION
