"""A new task: a copy of the bundled template under another name, and its row in the pool's manifest.

In: a name, tags and a pool's folder. Out: the task folder, which validates as it is: write the instruction, the
starting files, the checks and the solution over it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rl360.errors import TaskError
from rl360.tasks.manifest import MANIFEST_NAME, read_manifest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def new_task(name: str, pool: Path, tags: Sequence[str], template: Path) -> Path:
    """Copy `template` to `pool`/`name` and add its row; the manifest is made when there is none. Raises TaskError."""
    folder, manifest = pool / name, pool / MANIFEST_NAME
    problems = []
    if not _NAME.fullmatch(name):
        problems.append(f"{name!r}: names a folder; expected letters, digits, '.', '_' and '-'")
    for tag in tags:
        if not _NAME.fullmatch(tag):  # it names metrics: reward/domain/<tag>/mean
            problems.append(f"tag {tag!r}: expected letters, digits, '.', '_' and '-'; repeat --tag for several")
    if folder.exists():
        problems.append(f"{folder}: exists already")
    rows, wrong = read_manifest(manifest) if manifest.exists() else ([], [])
    problems += wrong
    if any(row.instance_id == name for row in rows):
        problems.append(f"{manifest}: has a task {name} already")
    if problems:
        raise TaskError(problems)
    pool.mkdir(parents=True, exist_ok=True)
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns("__pycache__"))
    prompt = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    row = {"prompt": prompt, "metadata": {"instance_id": name, "tags": list(tags)}}
    before = manifest.read_text(encoding="utf-8") if manifest.exists() else ""
    gap = "" if not before or before.endswith("\n") else "\n"
    manifest.write_text(f"{before}{gap}{json.dumps(row)}\n", encoding="utf-8")
    return folder
