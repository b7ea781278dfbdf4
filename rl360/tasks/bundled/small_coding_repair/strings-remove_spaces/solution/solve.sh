#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def remove_spaces(s):
    return s.replace(' ', '')
SOLUTION
