"""What the function is called with, and what it has to return."""

FUNCTION = 'sort_descending'
CASES = [
    (([1, 3, 2],), [3, 2, 1]),
    (([],), []),
    (([5, 9],), [9, 5]),
]
