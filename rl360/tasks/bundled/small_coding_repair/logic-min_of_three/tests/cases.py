"""What the function is called with, and what it has to return."""

FUNCTION = 'min_of_three'
CASES = [
    ((1, 2, 3), 1),
    ((5, 4, 9), 4),
    ((7, 8, 6), 6),
]
