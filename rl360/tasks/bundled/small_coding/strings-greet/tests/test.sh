#!/bin/sh
# The reward is 0 until the grader says otherwise. -I -S: nothing that the agent installed is imported.
PATH=/usr/local/bin:/usr/bin:/bin:/opt/python/bin
export PATH
mkdir -p /logs/verifier
exec python3 -I -S -B /tests/test_solution.py /app/solution.py /logs/verifier/reward.txt
