#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def double_all(xs):
    return [x * 2 for x in xs]
SOLUTION
