"""What the function is called with, and what it has to return."""

FUNCTION = 'has_key'
CASES = [
    (({'a': 1}, 'a'), True),
    (({}, 'a'), False),
    (({'b': 0}, 'b'), True),
]
