"""What the function is called with, and what it has to return."""

FUNCTION = 'square'
CASES = [
    ((5,), 25),
    ((-3,), 9),
    ((0,), 0),
]
