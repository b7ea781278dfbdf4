"""What the function is called with, and what it has to return."""

FUNCTION = 'abs_diff'
CASES = [
    ((3, 7), 4),
    ((7, 3), 4),
    ((-2, 2), 4),
]
