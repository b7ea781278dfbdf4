"""Write what the bundled multi-turn tasks and the template of `rl360 tasks new` have in common.

In: the hand-written parts of each task (instruction.md, environment/app, tests/checks.py, solution/), where they lie in
rl360/tasks/bundled, and grading.py beside this file. Out: task.toml, the Dockerfile, tests/test.sh, tests/grading.py of
each, and the manifests. Run it after changing any; tests/tasks/test_multi_turn.py fails when the folders are not what
this writes.

    python scripts/multi_turn/build.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "rl360" / "tasks" / "bundled"

# pool -> task -> (tags, difficulty)
POOLS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "multi_turn": {
        "fix-interval-merge": (("debugging", "python", "multi_turn"), "easy"),
        "fix-csv-report": (("debugging", "python", "data", "multi_turn"), "medium"),
        "fix-todo-cli": (("debugging", "python", "cli", "multi_turn"), "medium"),
        "fix-rotate-script": (("debugging", "shell", "multi_turn"), "medium"),
        "edit-service-config": (("config", "ini", "multi_turn"), "easy"),
        "migrate-json-config": (("config", "json", "multi_turn"), "medium"),
        "count-log-errors": (("data", "shell", "multi_turn"), "easy"),
        "use-inventory-tool": (("cli", "tools", "multi_turn"), "medium"),
    },
    "template": {"count-words": (("coding",), "easy")},
}

TASK_TOML = """\
schema_version = "1.4"
# What the verifier gets of the agent's sandbox. It runs in a sandbox of its own, so what the agent did to the system
# of its sandbox (programs, users, processes) does not matter.
artifacts = ["/app"]

[metadata]
category = "{tag}"
difficulty = "{difficulty}"

[environment]
build_timeout_sec = 120.0
network_mode = "no-network"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0
environment_mode = "separate"
"""

DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /app
COPY app/ /app/
"""

TEST_SH = """\
#!/bin/sh
# The reward is 0 until the checks say otherwise. -I -S: nothing that the agent installed is imported.
PATH=/usr/local/bin:/usr/bin:/bin:/opt/python/bin
export PATH
mkdir -p /logs/verifier
exec python3 -I -S -B /tests/grading.py /app /logs/verifier/reward.txt
"""


def build(target: Path) -> None:
    """Write the common parts into `target`, which holds the hand-written ones."""
    for pool, tasks in POOLS.items():
        rows = []
        for name, (tags, difficulty) in tasks.items():
            folder = target / pool / name
            files = {
                "task.toml": TASK_TOML.format(tag=tags[0], difficulty=difficulty),
                "environment/Dockerfile": DOCKERFILE,
                "tests/test.sh": TEST_SH,
                "tests/grading.py": (HERE / "grading.py").read_text(encoding="utf-8"),
            }
            for file, text in files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text, encoding="utf-8")
                (folder / file).chmod(0o755 if file.endswith(".sh") else 0o644)
            prompt = (folder / "instruction.md").read_text(encoding="utf-8").strip()
            chat = [{"role": "user", "content": prompt}]
            rows.append({"prompt": chat, "metadata": {"instance_id": name, "tags": list(tags)}})
        manifest = target / pool / "harbor_records.jsonl"
        manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
