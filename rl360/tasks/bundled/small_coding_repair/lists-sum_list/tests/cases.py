"""What the function is called with, and what it has to return."""

FUNCTION = 'sum_list'
CASES = [
    (([1, 2, 3],), 6),
    (([],), 0),
    (([-1, 1],), 0),
]
