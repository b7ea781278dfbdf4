#!/bin/sh
# Linter, formatter, type checker and tests: all of them run, whatever the first says; pytest's closing line is the last.
# Exit status: pytest's, or 1 when only another of them failed. Arguments go to pytest.
set -u
cd "$(dirname "$0")/.."
lint=0
scripts/lint.sh || lint=1
.venv/bin/python -m pytest "$@"
tests=$?
[ $tests -ne 0 ] && exit $tests
[ $lint -eq 0 ] || echo "the tests passed; lint did not (see above)" >&2
exit $lint
