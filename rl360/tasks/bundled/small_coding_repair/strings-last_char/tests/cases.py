"""What the function is called with, and what it has to return."""

FUNCTION = 'last_char'
CASES = [
    (('hello',), 'o'),
    (('x',), 'x'),
    (('Zed',), 'd'),
]
