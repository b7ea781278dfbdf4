"""What the function is called with, and what it has to return."""

FUNCTION = 'double'
CASES = [
    ((3,), 6),
    ((-4,), -8),
    ((0,), 0),
]
