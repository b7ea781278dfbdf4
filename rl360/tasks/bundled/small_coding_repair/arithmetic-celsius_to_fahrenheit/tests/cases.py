"""What the function is called with, and what it has to return."""

FUNCTION = 'celsius_to_fahrenheit'
CASES = [
    ((0,), 32),
    ((100,), 212),
    ((-40,), -40),
]
