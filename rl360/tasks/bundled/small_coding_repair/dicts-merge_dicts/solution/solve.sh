#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def merge_dicts(a, b):
    return {**a, **b}
SOLUTION
