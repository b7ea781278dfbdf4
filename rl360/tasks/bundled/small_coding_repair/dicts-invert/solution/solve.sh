#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def invert(d):
    return {value: key for key, value in d.items()}
SOLUTION
