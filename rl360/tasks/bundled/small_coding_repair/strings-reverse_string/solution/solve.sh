#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def reverse_string(s):
    return s[::-1]
SOLUTION
