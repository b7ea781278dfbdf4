"""What the function is called with, and what it has to return."""

FUNCTION = 'longest_word'
CASES = [
    (('a bbb cc',), 'bbb'),
    (('hello',), 'hello'),
    (('to longer me',), 'longer'),
]
