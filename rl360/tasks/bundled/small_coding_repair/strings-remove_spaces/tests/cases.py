"""What the function is called with, and what it has to return."""

FUNCTION = 'remove_spaces'
CASES = [
    (('a b c',), 'abc'),
    (('abc',), 'abc'),
    ((' x ',), 'x'),
]
