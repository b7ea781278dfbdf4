#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def sort_descending(xs):
    return sorted(xs, reverse=True)
SOLUTION
