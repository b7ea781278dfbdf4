"""What the function is called with, and what it has to return."""

FUNCTION = 'is_divisible'
CASES = [
    ((6, 3), True),
    ((7, 3), False),
    ((0, 5), True),
]
