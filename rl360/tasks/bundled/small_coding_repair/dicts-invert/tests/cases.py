"""What the function is called with, and what it has to return."""

FUNCTION = 'invert'
CASES = [
    (({'a': 1},), {1: 'a'}),
    (({},), {}),
    (({1: 2, 3: 4},), {2: 1, 4: 3}),
]
