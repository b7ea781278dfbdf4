"""Task pools: from a manifest and its folders to Task records, every problem reported at once.

In: a folder with harbor_records.jsonl, or a manifest file of another name; the task folders lie beside it. Out: Tasks
in the manifest's order, each with a hash of its content. Running tasks and judging their quality are left to others;
Harbor is not imported, so that `check` answers on a machine without it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.errors import TaskError
from rl360.types import Task

MANIFEST_NAME = "harbor_records.jsonl"

# Caches that tools leave inside a task folder; they change neither the task nor its hash.
_IGNORED_NAMES = frozenset({"__pycache__", ".git", ".DS_Store"})


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """One line of a manifest."""

    line: int  # 1 is the first
    instance_id: str  # names the task's folder
    tags: tuple[str, ...]


def manifest_path(path: Path | str) -> Path:
    """The manifest that `tasks.path` means: the file itself, or harbor_records.jsonl of the folder."""
    path = Path(path).expanduser()
    return path / MANIFEST_NAME if path.is_dir() else path


def load_tasks(path: Path | str, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> list[Task]:
    """All tasks of a manifest, in its order.

    include: keep only these ids (empty: all). exclude: drop these ids. Both may only name ids that the manifest has.
    Raises `TaskError` with every problem of the manifest, of the two lists, and of the folders of the tasks kept.
    """
    manifest = manifest_path(path)
    rows, problems = read_manifest(manifest)
    known = [row.instance_id for row in rows]
    wanted, dropped = tuple(include), frozenset(exclude)
    if rows:
        for key, ids in (("include", wanted), ("exclude", sorted(dropped))):
            problems += [f"tasks.{key}: {_unknown(task_id, known)}" for task_id in ids if task_id not in known]
    kept = [row for row in rows if (not wanted or row.instance_id in wanted) and row.instance_id not in dropped]
    for row in kept:
        problems += validate_layout(manifest.parent / row.instance_id)
    if rows and not kept and not problems:
        problems.append(f"tasks: {manifest} has {len(rows)} tasks, and include and exclude leave none")
    if problems:
        raise TaskError(problems)
    return [
        Task(
            task_id=row.instance_id,
            path=(manifest.parent / row.instance_id).resolve(),
            tags=row.tags,
            content_hash=content_hash(manifest.parent / row.instance_id),
        )
        for row in kept
    ]


def read_manifest(manifest: Path) -> tuple[list[ManifestRow], list[str]]:
    """The rows that are right, and what is wrong with the others. Never raises for content."""
    try:
        lines = manifest.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        hint = "" if manifest.name != MANIFEST_NAME else " (a task pool is a folder with this file beside its tasks)"
        return [], [f"tasks.path: {manifest}: no such file{hint}"]
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"tasks.path: {manifest}: {error}"]
    rows: list[ManifestRow] = []
    problems: list[str] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_row(line, number)
        if isinstance(row, str):
            problems.append(f"{manifest}:{number}: {row}")
        elif row.instance_id in first_line:
            problems.append(
                f"{manifest}:{number}: instance_id {row.instance_id!r} again; line {first_line[row.instance_id]} has it"
            )
        else:
            first_line[row.instance_id] = number
            rows.append(row)
    if not rows and not problems:
        problems.append(f"tasks.path: {manifest}: no rows")
    return rows, problems


def validate_layout(folder: Path) -> list[str]:
    """What keeps this folder from being a Harbor task; empty when nothing does."""
    if not folder.is_dir():
        return [f"{folder}: the manifest names this task, and there is no such folder"]
    problems = []
    instruction = folder / "instruction.md"
    if not instruction.is_file():
        problems.append(f"{instruction}: missing; it is what the agent is asked")
    elif not instruction.read_text(encoding="utf-8", errors="replace").strip():
        problems.append(f"{instruction}: empty")
    if not (folder / "tests" / "test.sh").is_file():
        problems.append(f"{folder / 'tests' / 'test.sh'}: missing; it writes /logs/verifier/reward.txt")
    config_path = folder / "task.toml"
    config: dict[str, Any] = {}
    if not config_path.is_file():
        problems.append(f"{config_path}: missing; it has the time limits, resources and network of the task")
    else:
        try:
            config = tomllib.loads(config_path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(f"{config_path}: not TOML: {error}")
        problems += _config_problems(config, config_path)
    environment = _table(config, "environment")
    if not (folder / "environment" / "Dockerfile").is_file() and not environment.get("docker_image"):
        problems.append(f"{folder / 'environment' / 'Dockerfile'}: missing, and task.toml names no docker_image")
    return problems


def content_hash(folder: Path) -> str:
    """sha256 over the paths, execute bits and bytes of all files of a task, in path order; links are followed."""
    digest = hashlib.sha256()
    for path in sorted(_files(folder)):
        content = path.read_bytes()
        executable = "x" if os.access(path, os.X_OK) else "-"
        digest.update(f"{path.relative_to(folder).as_posix()}\0{executable}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(folder: Path) -> Iterable[Path]:
    for root, names, files in os.walk(folder, followlinks=True):
        names[:] = [name for name in names if name not in _IGNORED_NAMES]
        yield from (Path(root) / name for name in files if name not in _IGNORED_NAMES)


def _parse_row(line: str, number: int) -> ManifestRow | str:
    """The row, or what is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(row, dict):
        return f"{type(row).__name__}; expected an object with prompt and metadata"
    if problem := _prompt_problem(row.get("prompt")):
        return problem
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        return "no metadata object; expected metadata.instance_id and metadata.tags"
    instance_id = metadata.get("instance_id")
    if not isinstance(instance_id, str) or not instance_id:
        return "no metadata.instance_id; it names the task's folder"
    if "/" in instance_id or instance_id in (".", ".."):
        return f"metadata.instance_id {instance_id!r}: expected the name of a folder beside the manifest, not a path"
    tags = metadata.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
        return f"metadata.tags {tags!r}: expected a list of words; the first is the task's domain"
    return ManifestRow(line=number, instance_id=instance_id, tags=tuple(tags))


def _prompt_problem(prompt: object) -> str | None:
    """A prompt is a text, or a chat: a list of messages with role and content."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "prompt: empty"
    if isinstance(prompt, list) and prompt:
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in prompt):
            return None
        return "prompt: every message of a chat needs role and content"
    return f"prompt {prompt!r}: expected a text or a list of messages"


def _config_problems(config: dict[str, Any], path: Path) -> list[str]:
    """Time limits that are no positive numbers, and tables that are none. Harbor checks the rest at a trial's start."""
    problems = []
    limits = {"agent": "timeout_sec", "verifier": "timeout_sec", "environment": "build_timeout_sec"}
    for table, key in limits.items():
        if table in config and not isinstance(config[table], dict):
            problems.append(f"{path}: {table}: expected a table")
            continue
        value = _table(config, table).get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not number or not math.isfinite(value) or value <= 0):
            problems.append(f"{path}: {table}.{key}: {value!r}; expected seconds above 0")
    return problems


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def _unknown(task_id: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(task_id, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; the manifest has {len(known)} tasks"
    return f"{task_id}: not in the manifest{hint}"
