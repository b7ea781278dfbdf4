#!/bin/sh
# ruff (rules and format) and mypy over what is committed here; all of them run, whatever the first says.
set -u
cd "$(dirname "$0")/.."
status=0
.venv/bin/ruff check --quiet . || status=1
.venv/bin/ruff format --quiet --check . || { echo "lint: run 'make format'" >&2; status=1; }
.venv/bin/mypy --no-error-summary || status=1
[ $status -eq 0 ] && echo "lint: ruff and mypy have nothing to say"
exit $status
