#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def average(a, b):
    return (a + b) / 2
SOLUTION
