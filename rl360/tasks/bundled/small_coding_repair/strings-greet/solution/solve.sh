#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def greet(name):
    return 'Hello, ' + name
SOLUTION
