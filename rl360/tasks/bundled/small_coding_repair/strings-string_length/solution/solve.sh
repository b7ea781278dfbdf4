#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def string_length(s):
    return len(s)
SOLUTION
