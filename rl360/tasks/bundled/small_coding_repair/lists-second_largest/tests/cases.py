"""What the function is called with, and what it has to return."""

FUNCTION = 'second_largest'
CASES = [
    (([1, 2, 3],), 2),
    (([9, 5],), 5),
    (([4, 8, 6],), 6),
]
