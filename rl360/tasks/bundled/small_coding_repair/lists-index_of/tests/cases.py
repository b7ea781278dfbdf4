"""What the function is called with, and what it has to return."""

FUNCTION = 'index_of'
CASES = [
    (([5, 6, 7], 6), 1),
    (([1], 9), -1),
    (([4, 4], 4), 0),
]
