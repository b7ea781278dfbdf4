#!/bin/sh
python3 - <<'END'
import json


def without_null(value):
    if isinstance(value, dict):
        return {k: without_null(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_null(v) for v in value if v is not None]
    return value


old = json.load(open("/app/config.v1.json"))
new = {"version": 2, **without_null(old)}
port = new.pop("default_port")
hosts = [entry.partition(":") for entry in old["hosts"].split(",")]
new["hosts"] = [{"host": host, "port": int(given or port)} for host, _, given in hosts]
new["timeout_s"] = new.pop("timeout_ms") / 1000
new["features"] = sorted(name for name, state in old["features"].items() if state == "on")
new["users"] = {}
for name, role in old["users"]:
    new["users"].setdefault("admin" if role == "superuser" else role, []).append(name)
json.dump(new, open("/app/config.v2.json", "w"), indent=2)
END
