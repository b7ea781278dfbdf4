"""What the function is called with, and what it has to return."""

FUNCTION = 'between'
CASES = [
    ((5, 1, 10), True),
    ((1, 1, 2), True),
    ((0, 1, 2), False),
]
