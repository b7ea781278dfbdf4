"""What the function is called with, and what it has to return."""

FUNCTION = 'double_all'
CASES = [
    (([1, 2],), [2, 4]),
    (([],), []),
    (([-1, 0],), [-2, 0]),
]
