#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def is_positive(n):
    return n > 0
SOLUTION
