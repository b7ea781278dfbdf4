"""What the function is called with, and what it has to return."""

FUNCTION = 'sum_to_n'
CASES = [
    ((1,), 1),
    ((10,), 55),
    ((4,), 10),
]
