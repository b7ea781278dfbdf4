#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def join_with_dash(words):
    return '-'.join(words)
SOLUTION
