#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def remainder(a, b):
    return a % b
SOLUTION
