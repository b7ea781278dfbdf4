#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def count_items(xs):
    return len(xs)
SOLUTION
