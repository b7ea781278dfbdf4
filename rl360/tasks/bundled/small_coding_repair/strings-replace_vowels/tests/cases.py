"""What the function is called with, and what it has to return."""

FUNCTION = 'replace_vowels'
CASES = [
    (('hello',), 'h*ll*'),
    (('xyz',), 'xyz'),
    (('aei',), '***'),
]
