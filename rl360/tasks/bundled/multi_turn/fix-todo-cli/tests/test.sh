#!/bin/sh
# The reward is 0 until the checks say otherwise. -I -S: nothing that the agent installed is imported.
PATH=/usr/local/bin:/usr/bin:/bin:/opt/python/bin
export PATH
mkdir -p /logs/verifier
exec python3 -I -S -B /tests/grading.py /app /logs/verifier/reward.txt
