#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def add_three(a, b, c):
    return a + b + c
SOLUTION
