"""What the function is called with, and what it has to return."""

FUNCTION = 'word_lengths'
CASES = [
    ((['a', 'bb'],), {'a': 1, 'bb': 2}),
    (([],), {}),
    ((['xyz'],), {'xyz': 3}),
]
