"""What the function is called with, and what it has to return."""

FUNCTION = 'grade'
CASES = [
    ((50,), 'pass'),
    ((49,), 'fail'),
    ((90,), 'pass'),
]
