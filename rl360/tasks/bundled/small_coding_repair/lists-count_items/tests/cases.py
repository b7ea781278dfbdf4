"""What the function is called with, and what it has to return."""

FUNCTION = 'count_items'
CASES = [
    (([1, 2, 3],), 3),
    (([],), 0),
    ((['a'],), 1),
]
