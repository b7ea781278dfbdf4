#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def second_largest(xs):
    return sorted(xs)[-2]
SOLUTION
