#!/bin/sh
python3 - <<'END'
section, out = "", []
new = {("server", "port"): "8443", ("server", "tls"): "yes", ("database", "pool_size"): "20"}
for line in open("/app/service.ini").read().rstrip("\n").split("\n"):
    if line.startswith("["):
        section = line.strip("[]")
    key = line.partition("=")[0].strip()
    if (section, key) == ("database", "debug"):
        continue
    out.append(f"{key} = {new[section, key]}" if (section, key) in new else line)
out.append("file = /var/log/service.log")
open("/app/service.ini", "w").write("\n".join(out) + "\n")
END
