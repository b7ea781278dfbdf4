#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def is_palindrome(s):
    return s == s[::-1]
SOLUTION
