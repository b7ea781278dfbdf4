#!/bin/sh
python3 - <<'END'
import json
import re
from collections import Counter, defaultdict

rows = []
for line in open("/app/access.log"):
    if not line.startswith("#"):
        client, path, status, size, ms = re.match(
            r'(\S+) - - \[.*?\] "\S+ ([^? ]+)\S* \S+" (\d+) (\d+|-) (\d+)ms', line
        ).groups()
        rows.append((client, path, int(status), 0 if size == "-" else int(size), int(ms)))
durations = defaultdict(list)
for row in rows:
    durations[row[1]].append(row[4])
summary = {
    "requests": len(rows),
    "server_errors": sum(row[2] >= 500 for row in rows),
    "bytes": sum(row[3] for row in rows),
    "top_client": Counter(row[0] for row in rows).most_common(1)[0][0],
    "slowest_path": max(durations, key=lambda path: sum(durations[path]) / len(durations[path])),
    "not_found_clients": sorted({row[0] for row in rows if row[2] == 404}),
}
json.dump(summary, open("/app/summary.json", "w"))
END
