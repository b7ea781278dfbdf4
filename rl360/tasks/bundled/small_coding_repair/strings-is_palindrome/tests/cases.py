"""What the function is called with, and what it has to return."""

FUNCTION = 'is_palindrome'
CASES = [
    (('level',), True),
    (('ab',), False),
    (('a',), True),
]
