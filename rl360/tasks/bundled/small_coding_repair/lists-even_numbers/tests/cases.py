"""What the function is called with, and what it has to return."""

FUNCTION = 'even_numbers'
CASES = [
    (([1, 2, 3, 4],), [2, 4]),
    (([1, 3],), []),
    (([0, 6],), [0, 6]),
]
