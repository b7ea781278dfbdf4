"""What the function is called with, and what it has to return."""

FUNCTION = 'max_of_two'
CASES = [
    ((1, 2), 2),
    ((5, 3), 5),
    ((4, 4), 4),
]
