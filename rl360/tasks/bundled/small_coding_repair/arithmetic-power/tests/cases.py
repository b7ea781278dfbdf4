"""What the function is called with, and what it has to return."""

FUNCTION = 'power'
CASES = [
    ((2, 10), 1024),
    ((3, 2), 9),
    ((5, 0), 1),
]
