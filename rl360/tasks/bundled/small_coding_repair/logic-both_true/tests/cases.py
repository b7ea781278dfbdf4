"""What the function is called with, and what it has to return."""

FUNCTION = 'both_true'
CASES = [
    ((True, True), True),
    ((True, False), False),
    ((False, False), False),
]
