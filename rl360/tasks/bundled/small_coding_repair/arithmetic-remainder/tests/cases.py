"""What the function is called with, and what it has to return."""

FUNCTION = 'remainder'
CASES = [
    ((7, 3), 1),
    ((10, 5), 0),
    ((9, 4), 1),
]
