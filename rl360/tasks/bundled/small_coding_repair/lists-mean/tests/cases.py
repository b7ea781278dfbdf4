"""What the function is called with, and what it has to return."""

FUNCTION = 'mean'
CASES = [
    (([1, 2, 3],), 2),
    (([4],), 4),
    (([1, 2],), 1.5),
]
