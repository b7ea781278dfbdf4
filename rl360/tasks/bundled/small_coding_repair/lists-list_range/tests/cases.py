"""What the function is called with, and what it has to return."""

FUNCTION = 'list_range'
CASES = [
    (([1, 5, 3],), 4),
    (([7],), 0),
    (([-1, 1],), 2),
]
