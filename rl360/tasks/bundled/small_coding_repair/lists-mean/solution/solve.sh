#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def mean(xs):
    return sum(xs) / len(xs)
SOLUTION
