"""What the function is called with, and what it has to return."""

FUNCTION = 'minutes_to_seconds'
CASES = [
    ((1,), 60),
    ((5,), 300),
    ((0,), 0),
]
