#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def contains(s, sub):
    return sub in s
SOLUTION
