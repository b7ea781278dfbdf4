"""What the function is called with, and what it has to return."""

FUNCTION = 'reverse_list'
CASES = [
    (([1, 2, 3],), [3, 2, 1]),
    (([],), []),
    ((['a', 'b'],), ['b', 'a']),
]
