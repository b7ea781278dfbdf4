#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def get_value(d, key):
    return d.get(key)
SOLUTION
