"""What the function is called with, and what it has to return."""

FUNCTION = 'is_positive'
CASES = [
    ((1,), True),
    ((0,), False),
    ((-5,), False),
]
