#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
def word_lengths(words):
    return {word: len(word) for word in words}
SOLUTION
