"""What the function is called with, and what it has to return."""

FUNCTION = 'string_length'
CASES = [
    (('abc',), 3),
    (('',), 0),
    (('a b',), 3),
]
