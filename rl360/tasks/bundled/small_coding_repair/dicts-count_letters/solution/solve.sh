#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def count_letters(s):
    return {c: s.count(c) for c in s}
SOLUTION
