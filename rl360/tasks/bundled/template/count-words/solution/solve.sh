#!/bin/sh
cat >/app/count_words.py <<'END'
import sys

print(len(sys.stdin.read().split()))
END
