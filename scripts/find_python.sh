#!/bin/sh
# Print the path of a Python 3.12 or 3.13 that can be used here, 3.12 first; or say in one line why there is none.
# A candidate counts only when it runs: a pyenv shim for a version that is not selected exists and fails. Looked at, in
# order: $RL360_PYTHON, PATH, pyenv's versions wherever they lie, uv's own, and /usr/local.
set -u

PROBE='import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(0 if sys.implementation.name == "cpython" else 1)'

probe() { # prints MAJOR.MINOR of a CPython that runs
    [ -x "$1" ] && "$1" -I -c "$PROBE" 2>/dev/null
}

# HOME may be empty or somebody else's; the password database knows the user's own.
own_home=$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6)

candidates() { # one path a line
    old_ifs=$IFS
    IFS=:
    for folder in ${PATH:-/usr/local/bin:/usr/bin:/bin}; do
        for name in python3.12 python3.13 python3 python; do
            [ -x "$folder/$name" ] && echo "$folder/$name"
        done
        case $folder in */shims) ls -d "${folder%/shims}"/versions/3.1[23]*/bin/python 2>/dev/null ;; esac
    done
    IFS=$old_ifs
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$own_home/.pyenv" /opt/pyenv /usr/local/pyenv; do
        [ -n "$root" ] && ls -d "$root"/versions/3.1[23]*/bin/python 2>/dev/null
    done
    for root in "${UV_PYTHON_INSTALL_DIR:-}" "${HOME:-}/.local/share/uv/python" "$own_home/.local/share/uv/python"; do
        [ -n "$root" ] && ls -d "$root"/cpython-3.1[23]*/bin/python3 2>/dev/null
    done
    for path in /usr/local/bin/python3.1[23] /usr/bin/python3.1[23]; do
        [ -x "$path" ] && echo "$path"
    done
}

if [ -n "${RL360_PYTHON:-}" ]; then
    version=$(probe "$RL360_PYTHON") || version="no Python that runs"
    case $version in
        3.12 | 3.13) echo "$RL360_PYTHON" && exit 0 ;;
        *) echo "RL360_PYTHON=$RL360_PYTHON is $version; RL360 needs Python 3.12 or 3.13" >&2 && exit 1 ;;
    esac
fi

second=
seen=
# Here-document, not a pipe: the loop has to set variables of this shell.
while IFS= read -r path; do
    [ -n "$path" ] && version=$(probe "$path") || continue
    case $version in
        3.12) echo "$path" && exit 0 ;;
        3.13) [ -n "$second" ] || second=$path ;;
        *) case " $seen " in *" $version "*) ;; *) seen="${seen:+$seen }$version" ;; esac ;;
    esac
done <<EOF
$(candidates)
EOF
[ -n "$second" ] && echo "$second" && exit 0

echo "RL360 needs Python 3.12 or 3.13; found ${seen:-none}. Install one (Debian 13, Ubuntu 24.04: apt-get install python3 python3-venv; any: uv python install 3.12, or pyenv install 3.12), or name it: RL360_PYTHON=/path/to/python3.12 make ..." >&2
exit 1
