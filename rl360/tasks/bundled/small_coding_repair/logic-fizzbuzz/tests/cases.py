"""What the function is called with, and what it has to return."""

FUNCTION = 'fizzbuzz'
CASES = [
    ((15,), 'FizzBuzz'),
    ((9,), 'Fizz'),
    ((10,), 'Buzz'),
    ((7,), '7'),
]
