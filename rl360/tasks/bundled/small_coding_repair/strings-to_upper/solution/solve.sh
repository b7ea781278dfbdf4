#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def to_upper(s):
    return s.upper()
SOLUTION
