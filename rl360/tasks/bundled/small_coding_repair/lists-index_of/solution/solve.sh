#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def index_of(xs, x):
    return xs.index(x) if x in xs else -1
SOLUTION
