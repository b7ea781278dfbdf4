"""What the function is called with, and what it has to return."""

FUNCTION = 'gcd'
CASES = [
    ((12, 18), 6),
    ((7, 5), 1),
    ((10, 5), 5),
]
