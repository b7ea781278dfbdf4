"""What the function is called with, and what it has to return."""

FUNCTION = 'get_value'
CASES = [
    (({'a': 1}, 'a'), 1),
    (({}, 'a'), None),
    (({'x': 'y'}, 'x'), 'y'),
]
