#!/bin/sh
# Set up this checkout: .venv with the locked packages, the package itself (editable), bubblewrap, and the model.
#
#   scripts/setup.sh [local|cluster|dev]   local: to run experiments; cluster: with Megatron and SMG; dev: with the tests' tools too
#   TORCH=cpu scripts/setup.sh       torch's CPU build instead of the locked one (needs uv; see docs/guide/setup.md)
#   RL360_PYTHON=/path/to/python     the interpreter to use; RL360_MODELS=/folder: where models are kept
#
# What is done already is skipped: a second run takes about a second. Every failure ends with one line that says what
# to do; what the tools said is in .venv/setup.log.
set -eu
cd "$(dirname "$0")/.."
extra=${1:-local}
torch=${TORCH:-locked}
venv=.venv
python=$venv/bin/python
log=$venv/setup.log
# Measured on x86-64: 5.1 GiB of packages (4 GiB of them CUDA libraries), and their archives while they are unpacked.
needed_gib=9
[ "$torch" = cpu ] && needed_gib=4

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

# Trust what the system trusts, as curl and apt do: uv, and the pip of an early 3.12, otherwise bring their own list of
# certificate authorities and refuse a company's or a mirror's.
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}" UV_NATIVE_TLS="${UV_NATIVE_TLS:-1}"
system_bundle=/etc/ssl/certs/ca-certificates.crt
[ -n "${PIP_CERT:-}${REQUESTS_CA_BUNDLE:-}" ] || [ ! -r $system_bundle ] || export PIP_CERT=$system_bundle

case $extra in local | cluster | dev) ;; *) fail "unknown set '$extra'; expected local, cluster or dev" ;; esac
case $torch in locked | cpu) ;; *) fail "TORCH=$torch is unknown; expected cpu, or leave it out" ;; esac

as_root() { # run a command as root, without ever asking for a password
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo -n env DEBIAN_FRONTEND=noninteractive "$@"
    else
        return 1
    fi
}

apt_install() { # packages; quiet; the lists are fetched only when a first try fails
    command -v apt-get >/dev/null || return 1
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
        { as_root apt-get update -qq >/dev/null 2>&1 && as_root apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1; }
}

logged() { # WHAT COMMAND...: run quietly; on failure one line that names the likely cause
    what=$1
    shift
    "$@" >>"$log" 2>&1 && return 0
    if grep -qiE 'No space left|os error 28|Errno 28' "$log"; then
        fail "$what failed: the disk is full; free about $needed_gib GiB in $(pwd) (and in ${TMPDIR:-/tmp}), then run it again"
    elif grep -qiE 'name resolution|Name or service not known|ConnectionError|Max retries|dns error|Connection refused|timed out|Network is unreachable|No route to host|[Ff]ailed to fetch|from versions: none' "$log"; then
        fail "$what failed: the package index does not answer; check the network (or PIP_INDEX_URL, UV_INDEX_URL), then run it again; details: $log"
    elif grep -qiE 'hash|THESE PACKAGES DO NOT MATCH' "$log" && grep -qiE 'mismatch|DO NOT MATCH' "$log"; then
        fail "$what failed: a package is not the one that was locked (its hash differs); nothing was installed from it; details: $log"
    fi
    fail "$what failed: $(grep -iE 'error' "$log" | tail -n 1); details: $log"
}

# --- Python and the virtual environment ------------------------------------------------------------------------------
usable() { "$python" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

if ! usable; then
    if ! base=$(scripts/find_python.sh 2>/dev/null); then
        # A bare Debian 13 or Ubuntu 24.04 gets its own; an older release has none to give, and the search says so.
        candidate=$(apt-cache policy python3 2>/dev/null | sed -n 's/ *Candidate: *\(3\.1[0-9]*\).*/\1/p')
        case $candidate in 3.12 | 3.13) say "installing python3 $candidate" && apt_install python3 python3-venv || true ;; esac
        base=$(scripts/find_python.sh) || exit 1
    fi
    say "using $base ($("$base" -V 2>&1))"
    [ -e $venv ] && say "$venv is of another Python or broken: made anew" && rm -rf $venv
    if ! "$base" -c 'import venv, ensurepip' 2>/dev/null && ! command -v uv >/dev/null; then
        version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        apt_install "python$version-venv" || fail "$base cannot make virtual environments: apt-get install python$version-venv, then run it again"
    fi
    # The interpreter's own venv brings pip, which is needed where uv is not there.
    if "$base" -c 'import venv, ensurepip' 2>/dev/null; then
        "$base" -m venv $venv || fail "$base -m venv $venv failed"
    else
        uv venv --quiet --python "$base" $venv || fail "uv venv $venv failed"
    fi
fi

# --- packages --------------------------------------------------------------------------------------------------------
lock=requirements/$extra.txt
want="$(sha256sum <$lock | cut -c1-64) $torch"
dev_want="$(sha256sum <requirements/dev.txt | cut -c1-64) $torch"
stamp=$venv/.rl360-packages
# dev holds all that local and cluster hold, so an environment for dev needs nothing for them.
have=$(cat $stamp 2>/dev/null || true)
uv=$(command -v uv || command -v $venv/bin/uv || true)

if [ "$have" != "$want" ] && [ "$have" != "$dev_want" ]; then
    free_gib=$(($(df -Pk . | awk 'NR==2 {print $4}') / 1048576))
    [ -n "$have" ] || [ -d $venv/lib/python3.12/site-packages/torch ] || [ -d $venv/lib/python3.13/site-packages/torch ] ||
        [ $free_gib -ge $needed_gib ] || fail "$free_gib GiB free in $(pwd); the packages need about $needed_gib GiB"
    rm -f $stamp
    : >$log
    list=$lock
    if [ "$torch" = cpu ]; then
        [ -n "$uv" ] || fail "TORCH=cpu needs uv, which chooses torch's CPU build; install uv, or leave TORCH out"
        # The CPU build comes from another index, with other hashes, and without CUDA's libraries.
        list=$venv/packages-without-cuda.txt
        awk '/^[a-z]/ {skip = $0 ~ /^(torch|triton|nvidia-|cuda-)/} !skip' $lock >$list
    fi
    say "installing $(grep -c '^[a-z]' $list) packages ($extra)$([ -n "$have" ] || echo '; the first time takes minutes')"
    if [ -n "$uv" ]; then
        logged "installing packages" "$uv" pip install --quiet --python $python --no-deps --require-hashes -r $list
    else
        logged "installing packages" $python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $list
    fi
    if [ "$torch" = cpu ]; then
        version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' $lock)
        logged "installing torch for CPU" "$uv" pip install --quiet --python $python --no-deps --torch-backend cpu "torch==$version"
    fi
    echo "$want" >$stamp
fi

# --- the package itself ----------------------------------------------------------------------------------------------
self="$(sha256sum <pyproject.toml | cut -c1-64) $(pwd)"
self_stamp=$venv/.rl360-self
if [ "$(cat $self_stamp 2>/dev/null || true)" != "$self" ]; then
    : >>$log
    uv=$(command -v uv || command -v $venv/bin/uv || true)
    if [ -n "$uv" ]; then
        logged "installing rl360" "$uv" pip install --quiet --python $python --no-deps --no-build-isolation -e .
    else
        logged "installing rl360" $python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
    fi
    echo "$self" >$self_stamp
fi

# --- bubblewrap ------------------------------------------------------------------------------------------------------
if ! command -v bwrap >/dev/null; then
    say "installing bubblewrap"
    apt_install bubblewrap || fail "bubblewrap is missing and could not be installed without a password: run 'sudo apt-get install bubblewrap', then again"
fi

# --- the model -------------------------------------------------------------------------------------------------------
$python -m rl360.models.fetch smollm2_135m || fail "the model could not be prepared (see the line above); then run it again"
say "ready ($extra)"
