#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def last_digit(n):
    return n % 10
SOLUTION
