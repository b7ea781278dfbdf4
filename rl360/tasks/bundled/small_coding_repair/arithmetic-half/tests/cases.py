"""What the function is called with, and what it has to return."""

FUNCTION = 'half'
CASES = [
    ((4,), 2),
    ((3,), 1.5),
    ((-2,), -1),
]
