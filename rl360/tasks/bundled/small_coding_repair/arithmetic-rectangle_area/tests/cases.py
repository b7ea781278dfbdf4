"""What the function is called with, and what it has to return."""

FUNCTION = 'rectangle_area'
CASES = [
    ((2, 3), 6),
    ((5, 5), 25),
    ((0, 9), 0),
]
