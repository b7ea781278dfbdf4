"""What the function is called with, and what it has to return."""

FUNCTION = 'count_letters'
CASES = [
    (('aab',), {'a': 2, 'b': 1}),
    (('',), {}),
    (('xyx',), {'x': 2, 'y': 1}),
]
