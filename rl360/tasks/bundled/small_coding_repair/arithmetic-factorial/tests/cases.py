"""What the function is called with, and what it has to return."""

FUNCTION = 'factorial'
CASES = [
    ((0,), 1),
    ((5,), 120),
    ((3,), 6),
]
