#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def sign(n):
    return (n > 0) - (n < 0)
SOLUTION
