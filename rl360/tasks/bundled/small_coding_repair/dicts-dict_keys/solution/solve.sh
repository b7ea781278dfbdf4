#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def dict_keys(d):
    return sorted(d)
SOLUTION
