"""Who owns which sandbox, and removal of what a killed run left behind.

In: the state folder. Out: one owner folder per trial worker, named by run, pid and start time; after a kill -9, the
next start removes the processes, control groups and folders of owners that no longer run. Left to others: the clean end
of a live owner (keeper.py). Mounts need no removal: they live in the sandboxes' own mount namespaces. Standard library
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rl360.sandboxes.local import cgroups

_RECORD = "owner.json"
_KILL_FOR_S = 3.0  # processes of a dead owner are killed, and get this long to leave their groups


@dataclass(frozen=True)
class Owner:
    """A trial worker that owns sandboxes. Sandbox names and control groups begin with `name`."""

    name: str
    folder: Path

    @property
    def mount_point(self) -> Path:
        return self.folder / "mnt"


@dataclass(frozen=True)
class Sweep:
    """What a sweep removed."""

    owners: tuple[str, ...] = ()
    processes: int = 0
    cgroups: int = 0


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, which tells a reused pid apart. None: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold anything, also spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def register(state_dir: Path, run_id: str, parents: list[str]) -> Owner:
    """Make the owner folder of this process. `parents`: the folders in which it may make control groups."""
    pid = os.getpid()
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in run_id)[:40]
    name = f"{safe}-{pid}-{process_start(pid)}-{os.urandom(2).hex()}"
    folder = state_dir / name
    (folder / "mnt").mkdir(parents=True)
    record = {"pid": pid, "start": process_start(pid), "boot": _boot_id(), "run_id": run_id, "cgroup_parents": parents}
    temporary = folder / (_RECORD + ".tmp")
    temporary.write_text(json.dumps(record))
    temporary.rename(folder / _RECORD)
    return Owner(name, folder)


def sweep(state_dir: Path) -> Sweep:
    """Remove what owners that no longer run left. Safe to call from several processes at once."""
    owners, killed, removed = [], 0, 0
    for folder in sorted(state_dir.glob("*")) if state_dir.is_dir() else []:
        try:
            record = json.loads((folder / _RECORD).read_text())
        except (OSError, ValueError):
            continue  # being made, or being removed by another process
        same_boot = record["boot"] == _boot_id()
        if same_boot and process_start(record["pid"]) == record["start"]:
            continue
        if same_boot:
            counts = end(folder, record["cgroup_parents"])
            killed, removed = killed + counts[0], removed + counts[1]
        shutil.rmtree(folder, ignore_errors=True)
        owners.append(folder.name)
    return Sweep(tuple(owners), killed, removed)


def end(folder: Path, parents: list[str]) -> tuple[int, int]:
    """Kill the processes of an owner whose keeper is gone and remove its control groups. Returns how many of each.

    Its folder stays: an artifact may be on its way out of a disk in it.
    """
    killed: set[int] = set()
    removed: set[str] = set()
    until = time.monotonic() + _KILL_FOR_S
    while True:
        groups = [str(g) for p in parents for g in Path(p).glob(f"{cgroups.PREFIX}{folder.name}.*")]
        pids = cgroups.processes(groups) | _processes_with_mount(str(folder / "mnt"))
        pids.discard(os.getpid())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        left = cgroups.remove(groups)
        removed.update(set(groups) - set(left))
        if (not left and not pids) or time.monotonic() > until:
            return len(killed), len(removed)
        time.sleep(0.02)


def _processes_with_mount(mount_point: str) -> set[int]:
    """Processes whose mount namespace holds the owner's mount: its bubblewrap monitors, also without control groups."""
    own = os.readlink("/proc/self/ns/mnt")
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/mnt") != own:
                mounts = Path(f"/proc/{entry}/mountinfo").read_text()
                if f"{mount_point} " in mounts or f"{mount_point}/" in mounts:
                    found.add(int(entry))
        except OSError:
            continue
    return found
