#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def lengths(words):
    return [len(word) for word in words]
SOLUTION
