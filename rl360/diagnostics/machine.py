"""What this machine has, read without changing it: memory, disk, cores, GPUs.

In: nothing, or a folder. Out: small records and plain numbers. Judging them is left to `check` and to `doctor`, and
sandboxes to rl360.sandboxes.abilities.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROBE_TIMEOUT_S = 5.0  # nvidia-smi answers in a second
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `total` respects the control group that this process is in."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_mib: int
    driver: str


def memory() -> Memory:
    """Memory of the machine, or of the control group when that is smaller."""
    machine = psutil.virtual_memory()
    limit = _cgroup_memory_limit()
    total = min(machine.total, limit) if limit is not None else machine.total
    return Memory(total=total, available=min(machine.available, total))


def _cgroup_memory_limit() -> int | None:
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            value = int(path.read_text())
        except (OSError, ValueError):
            continue
        return value if value < _NO_LIMIT_BYTES else None
    return None


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def existing_ancestor(folder: Path) -> Path:
    """The folder itself, or the nearest parent that exists (a file counts: nothing can be made below it)."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_disk_bytes(folder: Path) -> int:
    """Bytes that a user may still write where `folder` is or will be."""
    return shutil.disk_usage(existing_ancestor(folder)).free


def write_problem(folder: Path) -> str | None:
    """Why nothing can be written at `folder`, tried for real in its nearest existing parent; None when it can."""
    ancestor = existing_ancestor(folder)
    if not ancestor.is_dir():
        return f"{ancestor} is a file"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rl360-probe-", dir=ancestor))
    except OSError as error:
        return f"cannot write to {ancestor} ({error.strerror or error})"
    return None


def gpus() -> list[Gpu]:
    """NVIDIA GPUs as nvidia-smi lists them; empty without it."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [Gpu(row[0], int(float(row[1])), row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]
