"""What the function is called with, and what it has to return."""

FUNCTION = 'add_three'
CASES = [
    ((1, 2, 3), 6),
    ((-1, 0, 1), 0),
    ((10, 20, 5), 35),
]
