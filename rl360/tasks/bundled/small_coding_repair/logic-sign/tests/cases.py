"""What the function is called with, and what it has to return."""

FUNCTION = 'sign'
CASES = [
    ((5,), 1),
    ((-2,), -1),
    ((0,), 0),
]
