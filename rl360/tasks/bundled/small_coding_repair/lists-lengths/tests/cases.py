"""What the function is called with, and what it has to return."""

FUNCTION = 'lengths'
CASES = [
    ((['a', 'bb'],), [1, 2]),
    (([],), []),
    ((['xyz'],), [3]),
]
