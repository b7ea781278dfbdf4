#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def first_element(xs):
    return xs[0]
SOLUTION
