"""What the function is called with, and what it has to return."""

FUNCTION = 'dict_keys'
CASES = [
    (({'b': 1, 'a': 2},), ['a', 'b']),
    (({},), []),
    (({'z': 0},), ['z']),
]
