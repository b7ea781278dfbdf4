"""What the function is called with, and what it has to return."""

FUNCTION = 'unique'
CASES = [
    (([2, 1, 2],), [1, 2]),
    (([],), []),
    (([3, 3, 3],), [3]),
]
