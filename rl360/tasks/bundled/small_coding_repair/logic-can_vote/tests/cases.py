"""What the function is called with, and what it has to return."""

FUNCTION = 'can_vote'
CASES = [
    ((18,), True),
    ((17,), False),
    ((40,), True),
]
