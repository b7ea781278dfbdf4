"""What the function is called with, and what it has to return."""

FUNCTION = 'average'
CASES = [
    ((2, 4), 3),
    ((1, 2), 1.5),
    ((-2, 2), 0),
]
