#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def count_vowels(s):
    return sum(c in 'aeiouAEIOU' for c in s)
SOLUTION
