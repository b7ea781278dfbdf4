"""What the function is called with, and what it has to return."""

FUNCTION = 'greet'
CASES = [
    (('Bob',), 'Hello, Bob'),
    (('Ann',), 'Hello, Ann'),
]
