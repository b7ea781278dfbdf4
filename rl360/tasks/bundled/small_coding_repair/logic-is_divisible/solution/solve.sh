#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def is_divisible(a, b):
    return a % b == 0
SOLUTION
