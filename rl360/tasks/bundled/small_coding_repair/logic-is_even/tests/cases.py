"""What the function is called with, and what it has to return."""

FUNCTION = 'is_even'
CASES = [
    ((2,), True),
    ((3,), False),
    ((0,), True),
]
