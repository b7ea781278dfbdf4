#!/bin/sh
# Compile requirements/*.txt from pyproject.toml: pinned, with hashes, for Linux and Python 3.12 and 3.13, without any
# download address, so that every user's own package index serves it. Versions already in the files are kept where they
# still fit; `scripts/lock.sh --upgrade` takes the newest. `scripts/lock.sh --check` writes nothing and fails when the
# files are not what it would write.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-$(command -v .venv/bin/uv || command -v uv)} || { echo "lock: no uv; run 'make test' once, which installs it" >&2; exit 1; }

check=0
upgrade=
case "${1:-}" in
    --check) check=1 ;;
    --upgrade) upgrade=--upgrade ;;
    "") ;;
    *) echo "usage: scripts/lock.sh [--check | --upgrade]" >&2; exit 2 ;;
esac

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
[ -d requirements ] && cp requirements/*.txt "$out"/

compile() { # NAME [EXTRA OPTIONS ...]: dev is compiled first and the others keep to its versions
    name=$1
    shift
    "$uv" pip compile --quiet --generate-hashes --universal --python-version 3.12 --no-header $upgrade \
        --override requirements/overrides.txt "$@" pyproject.toml requirements/build.in \
        --output-file "$out/$name.txt" >/dev/null
}
compile dev --extra local --extra daytona --extra cluster --extra dev
compile daytona --extra local --extra daytona --constraint "$out/dev.txt"
compile cluster --extra local --extra cluster --constraint "$out/dev.txt"
compile local --extra local --constraint "$out/dev.txt"
compile base --constraint "$out/dev.txt"

status=0
for name in base local daytona cluster dev; do
    # Comments name the paths of this run's own files; what asks for a package is in `uv pip tree`.
    {
        echo "# Written by scripts/lock.sh (make lock) from pyproject.toml. Install with --no-deps --require-hashes:"
        echo "# the list is complete, and requirements/overrides.txt has been applied to it."
        grep -v '^ *#' "$out/$name.txt"
    } >"$out/$name.lock"
    if [ $check = 1 ]; then
        cmp -s "$out/$name.lock" "requirements/$name.txt" || { echo "requirements/$name.txt is not current: run 'make lock'" >&2; status=1; }
    else
        cp "$out/$name.lock" "requirements/$name.txt"
    fi
done
exit $status
