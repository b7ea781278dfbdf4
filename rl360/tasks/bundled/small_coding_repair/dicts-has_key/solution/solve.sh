#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def has_key(d, key):
    return key in d
SOLUTION
