#!/bin/sh
# Linter, formatter, type checker and tests: all of them run, whatever the first says; pytest's closing line is the last.
# Exit status: pytest's, or 1 when only another of them failed. Arguments go to pytest. Files of tests are spread over
# RL360_TEST_WORKERS processes (the cores, at most 4; 0: all in one), each file in one of them.
set -u
cd "$(dirname "$0")/.."
lint=0
scripts/lint.sh || lint=1
cores=$(nproc 2>/dev/null || echo 1)
[ "$cores" -le 4 ] || cores=4
.venv/bin/python -m pytest -n "${RL360_TEST_WORKERS:-$cores}" --dist loadfile "$@"
tests=$?
[ $tests -ne 0 ] && exit $tests
[ $lint -eq 0 ] || echo "the tests passed; lint did not (see above)" >&2
exit $lint
