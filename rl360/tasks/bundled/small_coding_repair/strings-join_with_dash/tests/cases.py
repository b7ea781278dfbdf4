"""What the function is called with, and what it has to return."""

FUNCTION = 'join_with_dash'
CASES = [
    ((['a', 'b'],), 'a-b'),
    ((['x'],), 'x'),
    ((['a', 'b', 'c'],), 'a-b-c'),
]
