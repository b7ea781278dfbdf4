"""What the function is called with, and what it has to return."""

FUNCTION = 'contains'
CASES = [
    (('hello', 'ell'), True),
    (('hello', 'z'), False),
    (('a', 'a'), True),
]
