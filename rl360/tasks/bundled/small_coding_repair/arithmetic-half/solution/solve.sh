#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def half(x):
    return x / 2
SOLUTION
