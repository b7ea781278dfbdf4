#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def make_dict(keys, values):
    return dict(zip(keys, values))
SOLUTION
