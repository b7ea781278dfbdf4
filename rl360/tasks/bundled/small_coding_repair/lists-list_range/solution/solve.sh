#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def list_range(xs):
    return max(xs) - min(xs)
SOLUTION
