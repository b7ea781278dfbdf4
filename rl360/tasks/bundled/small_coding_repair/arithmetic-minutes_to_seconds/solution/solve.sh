#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def minutes_to_seconds(m):
    return m * 60
SOLUTION
