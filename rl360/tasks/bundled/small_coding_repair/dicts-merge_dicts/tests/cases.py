"""What the function is called with, and what it has to return."""

FUNCTION = 'merge_dicts'
CASES = [
    (({'a': 1}, {'b': 2}), {'a': 1, 'b': 2}),
    (({}, {}), {}),
    (({'x': 1}, {}), {'x': 1}),
]
