"""What the function is called with, and what it has to return."""

FUNCTION = 'count_vowels'
CASES = [
    (('hello',), 2),
    (('xyz',), 0),
    (('aeiou',), 5),
]
