"""What the function is called with, and what it has to return."""

FUNCTION = 'last_digit'
CASES = [
    ((123,), 3),
    ((40,), 0),
    ((7,), 7),
]
