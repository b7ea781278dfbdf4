#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def grade(score):
    return 'pass' if score >= 50 else 'fail'
SOLUTION
