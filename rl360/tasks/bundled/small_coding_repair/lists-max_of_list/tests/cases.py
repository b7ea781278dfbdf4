"""What the function is called with, and what it has to return."""

FUNCTION = 'max_of_list'
CASES = [
    (([1, 5, 3],), 5),
    (([-2, -7],), -2),
    (([4],), 4),
]
