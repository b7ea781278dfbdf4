"""Files of a run that a page may show: trial folders and logs, never anything outside the run folder.

In: a run folder and a name from an address or a row, neither to be trusted; a sandbox may have written the trial's
folder, with links in it. Out: names, sizes and parts of regular files that lie inside, links followed to their end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

SHOWN = ("trials", "logs", "resolved.yaml", "plan.json", "summary.json", "metrics.jsonl", "ledger.jsonl")
PART_BYTES = 128 << 10  # of a file on one page
MAX_FILES = 200  # listed of one folder
MAX_SEEN = 5000  # directory entries looked at for that


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, end) of a file of `size` bytes, as text."""

    text: str
    start: int
    end: int
    size: int


def inside(run_dir: Path, name: str) -> Path:
    """The real path of a shown file or folder. Raises FileNotFoundError for what is not there or not to be shown."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] not in SHOWN or ".." in parts or "\0" in name:
        raise FileNotFoundError(name)
    root = run_dir.resolve()
    try:
        path = (root / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise FileNotFoundError(name) from error
    if not any(path == root / shown or (root / shown) in path.parents for shown in SHOWN):
        raise FileNotFoundError(name)
    return path


def listing(run_dir: Path, folder: str) -> list[tuple[str, int]]:
    """(name from the run folder, bytes) of the regular files below a folder, links left out, at most MAX_FILES."""
    try:
        top = inside(run_dir, folder)
    except FileNotFoundError:
        return []
    found: list[tuple[str, int]] = []
    seen = 0
    for where, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            seen += 1
            if seen > MAX_SEEN or len(found) == MAX_FILES:
                return found
            path = Path(where) / name
            try:
                info = path.lstat()
            except OSError:
                continue  # gone meanwhile
            if stat.S_ISREG(info.st_mode):
                found.append((f"{folder}/{path.relative_to(top).as_posix()}", info.st_size))
    return found


def read_part(run_dir: Path, name: str, start: int | None = None) -> Part:
    """A part of a file from a byte on; None: its last part. Raises FileNotFoundError as `inside` does."""
    path = inside(run_dir, name)
    try:
        # Not a link any more, unless it was swapped just now; not blocking, if it is a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileNotFoundError(name) from error
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode) or not _is_at(handle, path):
        os.close(handle)
        raise FileNotFoundError(name)
    with os.fdopen(handle, "rb") as file:
        first = max(0, info.st_size - PART_BYTES) if start is None else min(max(0, start), info.st_size)
        file.seek(first)
        data = file.read(PART_BYTES)
    return Part(data.decode("utf-8", "replace"), first, first + len(data), info.st_size)


def trial_folder(row: Mapping[str, Any]) -> str | None:
    """The trial's folder as a name from the run folder. Only its last part is taken from the row, so that a run that
    was copied elsewhere still finds it."""
    trial = row.get("trial")
    name = PurePosixPath(str(trial["trial_dir"])).name if trial else ""
    return f"trials/{name}" if name not in ("", "..") else None


def _is_at(handle: int, path: Path) -> bool:
    """Whether no folder on the way was swapped for a link between resolving and opening."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}") == str(path)
    except OSError:
        return True  # no /proc: the check before has to do
