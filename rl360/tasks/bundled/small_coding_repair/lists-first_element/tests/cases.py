"""What the function is called with, and what it has to return."""

FUNCTION = 'first_element'
CASES = [
    (([3, 1, 2],), 3),
    ((['a'],), 'a'),
]
