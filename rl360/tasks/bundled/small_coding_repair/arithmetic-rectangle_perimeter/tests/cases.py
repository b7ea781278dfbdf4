"""What the function is called with, and what it has to return."""

FUNCTION = 'rectangle_perimeter'
CASES = [
    ((2, 3), 10),
    ((5, 5), 20),
    ((1, 0), 2),
]
