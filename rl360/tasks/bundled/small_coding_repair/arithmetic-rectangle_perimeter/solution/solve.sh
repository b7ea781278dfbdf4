#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def rectangle_perimeter(w, h):
    return 2 * (w + h)
SOLUTION
