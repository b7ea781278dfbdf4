"""What the function is called with, and what it has to return."""

FUNCTION = 'reverse_string'
CASES = [
    (('abc',), 'cba'),
    (('',), ''),
    (('xy',), 'yx'),
]
