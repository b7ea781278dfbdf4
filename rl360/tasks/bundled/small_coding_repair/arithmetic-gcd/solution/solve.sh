#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a
SOLUTION
