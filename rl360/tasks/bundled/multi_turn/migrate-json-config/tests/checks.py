"""The one right answer; and the old file is still there."""

WANT = {
    "version": 2,
    "name": "relay",
    "hosts": [
        {"host": "alpha", "port": 8080},
        {"host": "beta", "port": 7000},
        {"host": "gamma", "port": 9090},
        {"host": "delta", "port": 7000},
    ],
    "timeout_s": 2.25,
    "features": ["audit", "batching", "tracing"],
    "users": {"admin": ["ann", "cem", "eva"], "reader": ["bob", "dee"], "writer": ["fay"]},
    "limits": {"cpu": 4, "burst": {"cpu": 8, "note": ""}},
    "labels": [],
    "fallback": {"hosts": "omega:1", "timeout_ms": 10},
}


def check_the_new_file(work):
    got = work.json("config.v2.json")
    equal(sorted(got) if isinstance(got, dict) else got, sorted(WANT), "keys of the top level")
    for key, want in WANT.items():
        equal(got[key], want, key)


def check_the_old_file(work):
    old = work.json("config.v1.json")
    equal([old["default_port"], old["timeout_ms"], len(old["users"])], [7000, 2250, 6], "config.v1.json")
