"""What the function is called with, and what it has to return."""

FUNCTION = 'to_upper'
CASES = [
    (('abc',), 'ABC'),
    (('aB1',), 'AB1'),
    (('',), ''),
]
