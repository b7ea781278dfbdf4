#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def celsius_to_fahrenheit(c):
    return c * 9 / 5 + 32
SOLUTION
