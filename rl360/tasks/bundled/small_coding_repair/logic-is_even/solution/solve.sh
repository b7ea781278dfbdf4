#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def is_even(n):
    return n % 2 == 0
SOLUTION
