#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def power(a, b):
    return a ** b
SOLUTION
