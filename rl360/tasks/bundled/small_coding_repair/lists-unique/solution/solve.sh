#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def unique(xs):
    return sorted(set(xs))
SOLUTION
