#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def both_true(a, b):
    return a and b
SOLUTION
