#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def longest_word(s):
    return max(s.split(), key=len)
SOLUTION
