#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def double(x):
    return x * 2
SOLUTION
