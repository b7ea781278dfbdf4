"""What the function is called with, and what it has to return."""

FUNCTION = 'make_dict'
CASES = [
    ((['a', 'b'], [1, 2]), {'a': 1, 'b': 2}),
    (([], []), {}),
    ((['x'], [9]), {'x': 9}),
]
