#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def rectangle_area(w, h):
    return w * h
SOLUTION
