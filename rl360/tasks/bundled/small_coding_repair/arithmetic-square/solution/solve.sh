#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def square(n):
    return n * n
SOLUTION
