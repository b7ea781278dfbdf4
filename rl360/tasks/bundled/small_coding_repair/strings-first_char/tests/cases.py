"""What the function is called with, and what it has to return."""

FUNCTION = 'first_char'
CASES = [
    (('hello',), 'h'),
    (('x',), 'x'),
    (('Zed',), 'Z'),
]
