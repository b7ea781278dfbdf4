#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def replace_vowels(s):
    return ''.join('*' if c in 'aeiouAEIOU' else c for c in s)
SOLUTION
