#!/usr/bin/env bash
# A Docker daemon for the tests marked `docker`: one that answers already, or one of our own, with a base image that is
# built here and needs no image registry.
#
#   eval "$(scripts/docker_for_tests.sh [PID])"    start it; it ends when process PID ends (default: the caller)
#   scripts/docker_for_tests.sh stop               end it now; its images stay, so that the next start takes seconds
#
# On stdout only `export` lines: DOCKER_HOST, DOCKER_CONFIG, RL360_TEST_DOCKER_IMAGE. On stderr what is done, and at the
# end one line that says why there is no daemon; the status is then 1 and the docker tests are skipped.
# Needs root and apt (Debian or Ubuntu) unless everything is there. Each step has a time limit; RL360_DOCKER_DIR is
# where the daemon keeps its data (default ~/.cache/rl360/docker-for-tests).
set -eu
dir=${RL360_DOCKER_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/rl360/docker-for-tests}
image=rl360-test-base:2
socket=$dir/docker.sock
log=$dir/dockerd.log

say() { echo "docker: $*" >&2; }
fail() {
    say "$*"
    exit 1
}
# Everything here is polite: the tests that run beside it have the processor first.
limited() { # SECONDS COMMAND...
    timeout --kill-after=10 "$1" nice -n 19 "${@:2}"
}

stop() { # [PID]: only when the daemon is still that one
    pid=$(cat "$dir/dockerd.pid" 2>/dev/null || true)
    [ -z "${1:-}" ] || [ "$1" = "$pid" ] || return 0
    # What a daemon leaves on the host: its bridges. Its data stays, for the next start.
    limited 20 docker --host "unix://$socket" network rm rl360-sandboxes >/dev/null 2>&1 || true
    # dockerd ends its own containerd and containers.
    if [ -n "$pid" ] && grep -qs dockerd "/proc/$pid/comm"; then
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            grep -qs '^State:.[^Z]' "/proc/$pid/status" || break # gone, or only not reaped yet
            sleep 0.1
        done
    fi
    rm -f "$dir/dockerd.pid"
    ip link delete docker0 >/dev/null 2>&1 || true
}

if [ "${1:-}" = stop ]; then
    stop "${2:-}"
    exit 0
fi
watched=${1:-$PPID}
mkdir -p "$dir/config/cli-plugins"

# --- programs --------------------------------------------------------------------------------------------------------
export DEBIAN_FRONTEND=noninteractive
may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
apt_update() { limited 90 apt-get update -qq >/dev/null 2>&1 || true; }
apt_install() {
    limited 150 apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt_update && limited 150 apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1; }
}
mirror() { # the address that apt itself takes packages from
    apt-get indextargets --format '$(SITE)' 'Component: main' 'Origin: Debian' 2>/dev/null | grep -v security | head -n 1
}

# shellcheck source=/dev/null
. /etc/os-release 2>/dev/null || true
if ! docker version >/dev/null 2>&1 && ! command -v dockerd >/dev/null; then
    may_install || fail "no daemon answers, and installing one needs root and apt"
    say "installing docker.io"
    apt_install docker.io iptables || fail "apt-get install docker.io failed"
fi
command -v docker >/dev/null || { may_install && apt_install docker-cli; } || fail "no docker client"

plugins_from_newer_debian() { # Debian 12's own compose is version 1; the next release's plugins are static enough
    [ "${VERSION_CODENAME:-}" = bookworm ] || return 1
    site=$(mirror)
    [ -n "$site" ] || return 1
    private=$dir/apt
    mkdir -p "$private/lists/partial" "$private/cache/archives/partial" "$private/sources"
    printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
        "$site" >"$private/sources/trixie.sources"
    options=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$private/sources" -o "Dir::State::lists=$private/lists"
        -o "Dir::Cache=$private/cache" -o APT::Sandbox::User=root)
    limited 90 apt-get -qq "${options[@]}" update >/dev/null 2>&1 &&
        (cd "$private" && limited 90 apt-get -qq "${options[@]}" download docker-compose docker-buildx >/dev/null 2>&1) || return 1
    for deb in "$private"/docker-*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -xf - -C "$dir/config/cli-plugins" --strip-components=5 --wildcards './usr/libexec/docker/cli-plugins/docker-*'
    done
    rm -rf "$private"
}
export DOCKER_CONFIG=${DOCKER_CONFIG:-$dir/config}
has_plugins() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }
if ! has_plugins; then
    may_install || fail "docker compose or docker buildx is missing, and installing them needs root and apt"
    say "installing docker compose and buildx"
    DOCKER_CONFIG=$dir/config
    plugins_from_newer_debian || apt_install docker-compose-v2 docker-buildx || apt_install docker-compose docker-buildx || true
    has_plugins || fail "no docker compose version 2 with buildx could be installed"
fi

# --- daemon ----------------------------------------------------------------------------------------------------------
answers() { limited 10 docker info >/dev/null 2>&1; }
own=0
if ! answers; then
    export DOCKER_HOST=unix://$socket
    own=1
    if ! answers; then
        [ "$(id -u)" = 0 ] || fail "no daemon answers, and starting one needs root"
        command -v dockerd >/dev/null || apt_install docker.io iptables || fail "apt-get install docker.io failed"
        # Networks of a daemon that was killed: 20.10 panics over a half-written one ("index out of range" in libnetwork).
        rm -rf "$dir/dockerd.pid" "$socket" "$dir/data/network"
        say "starting dockerd"
        # The descriptors of the caller's pipe must not stay open in it: `eval "$(...)"` would wait for the daemon.
        setsid nice -n 5 dockerd --host "$DOCKER_HOST" --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/dockerd.pid" \
            >"$log" 2>&1 </dev/null &
        daemon=$!
        for _ in $(seq 60); do
            sleep 0.5
            answers && break
            [ -e "/proc/$daemon" ] || fail "dockerd ended: $(grep -iE 'failed|error' "$log" | tail -n 1 | cut -c-300)"
        done
        answers || { stop; fail "dockerd did not answer within 30 s; see $log"; }
    fi
fi

# --- base image ------------------------------------------------------------------------------------------------------
build_image() {
    command -v debootstrap >/dev/null || { may_install && apt_install debootstrap; } || return 1
    [ "$(id -u)" = 0 ] || return 1
    site=$(mirror)
    root=$(mktemp -d "$dir/rootfs.XXXXXX")
    say "building $image with debootstrap"
    limited 240 debootstrap --variant=minbase --include=ca-certificates,tmux,procps,python3-minimal bookworm "$root" ${site:+"$site"} \
        >"$dir/debootstrap.log" 2>&1 &&
        rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* &&
        tar -C "$root" -c . | limited 120 docker import --change 'CMD ["bash"]' --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$image" >/dev/null
    status=$?
    rm -rf "$root"
    return $status
}
if ! docker image inspect "$image" >/dev/null 2>&1; then
    build_image || { [ $own = 1 ] && stop; fail "the base image could not be built (debootstrap, root and apt's mirror are needed)"; }
fi

if [ $own = 1 ]; then
    # The watcher ends the daemon when whoever asked for it is gone, however it went.
    setsid bash -c 'while [ -e "/proc/$1" ]; do sleep 1; done; exec "$2" stop "$3"' _ "$watched" "$(realpath "$0")" \
        "$(cat "$dir/dockerd.pid")" >/dev/null 2>&1 </dev/null &
fi
say "ready: $(docker version --format '{{.Server.Version}}' 2>/dev/null), storage $(docker info --format '{{.Driver}}' 2>/dev/null)"
[ $own = 0 ] || echo "export DOCKER_HOST=$DOCKER_HOST"
echo "export DOCKER_CONFIG=$DOCKER_CONFIG"
echo "export RL360_TEST_DOCKER_IMAGE=$image"
