#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def can_vote(age):
    return age >= 18
SOLUTION
