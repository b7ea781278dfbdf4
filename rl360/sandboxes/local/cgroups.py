"""Memory, CPU and process limits of one sandbox, as control groups v1 or v2.

In: limits. Out: the directories made, the `cgroup.procs` files that a sandbox writes its pid to, and what the kernel
counted. Left to others: who joins (keeper.py) and when the groups go (keeper.py, cleanup.py). Standard library only.

New groups are made below the group that this process is in (v1), so an outer limit still holds. v2 allows processes
only in leaves, so there the nearest ancestor without processes is taken, or the root of a container's own hierarchy
after its processes were moved to a leaf. Where neither can be written, `find` says why and limits fall back to
prlimit, which bounds each process and not the sandbox.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PREFIX = "rl360-"
_CPU_PERIOD_US = 100_000  # the kernel's default period
_CHARGE_BYTES = 4 * 2**20  # more than the kernel asks for at once: a huge page of 2 MiB, or a batch of small ones
_CONTROLLERS = ("memory", "cpu", "pids")
_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """0 means no limit."""

    memory_mib: int = 0
    cpus: float = 0.0
    pids: int = 0


@dataclass(frozen=True)
class Hierarchy:
    """Where groups can be made: one parent folder a controller (v1), or one for all (v2)."""

    version: int  # 1 | 2; 0: none, see reason
    parents: dict[str, str]  # controller -> folder
    reason: str = ""  # why a controller is missing; empty when all are there

    @property
    def usable(self) -> bool:
        return bool(self.parents)

    def missing(self, limits: Limits) -> list[str]:
        wanted = {"memory": limits.memory_mib, "cpu": limits.cpus, "pids": limits.pids}
        return [name for name, value in wanted.items() if value and name not in self.parents]


def find(root: Path = _ROOT, self_cgroup: Path = Path("/proc/self/cgroup")) -> Hierarchy:
    """Find where this process may make groups. In a v2 container its processes may be moved to a leaf for it."""
    try:
        rows = [line.split(":", 2) for line in self_cgroup.read_text().splitlines()]
    except OSError as error:
        return Hierarchy(0, {}, f"cannot read {self_cgroup}: {error.strerror}")
    v1 = {name: path for _, names, path in rows for name in names.split(",") if name in _CONTROLLERS}
    if v1:
        return _find_v1(root, v1)
    own = next((path for number, _, path in rows if number == "0"), None)
    if own is None or not (root / "cgroup.controllers").exists():
        return Hierarchy(0, {}, f"no control groups at {root}")
    return _find_v2(root, own)


def _find_v1(root: Path, own: dict[str, str]) -> Hierarchy:
    parents, refused = {}, []
    for name, path in own.items():
        # In a container the path can be one of the host's, which is not visible: then the mount's root is ours.
        candidates = [root / name / path.lstrip("/"), root / name]
        folder = next((c for c in candidates if c.is_dir()), None)
        if folder is not None and os.access(folder, os.W_OK):
            parents[name] = str(folder)
        else:
            refused.append(f"{root / name} is not writable")
    refused += [f"controller {name} is not mounted" for name in _CONTROLLERS if name not in own]
    return Hierarchy(1 if parents else 0, parents, "; ".join(refused))


def _find_v2(root: Path, own: str) -> Hierarchy:
    folder = root / own.lstrip("/")
    if not folder.is_dir():
        folder = root
    chain = [folder, *(p for p in folder.parents if p == root or root in p.parents)]
    for candidate in chain:
        if not os.access(candidate, os.W_OK) or not os.access(candidate / "cgroup.procs", os.W_OK):
            continue
        real_root = candidate == root and not (root / "cgroup.type").exists()
        occupied = bool((candidate / "cgroup.procs").read_text().strip())
        if occupied and not real_root:
            if candidate != root:
                continue
            _move_processes_to_leaf(candidate)
        offered = (candidate / "cgroup.controllers").read_text().split()
        usable = [name for name in _CONTROLLERS if name in offered]
        for name in usable:
            try:
                (candidate / "cgroup.subtree_control").write_text(f"+{name}")
            except OSError:
                usable = [u for u in usable if u != name]
        if usable:
            lacking = [name for name in _CONTROLLERS if name not in usable]
            reason = f"{candidate} does not offer {', '.join(lacking)}" if lacking else ""
            return Hierarchy(2, {name: str(candidate) for name in usable}, reason)
    return Hierarchy(
        0, {}, f"no writable ancestor of {folder}: run as root, or under `systemd-run --user --scope -p Delegate=yes`"
    )


def _move_processes_to_leaf(folder: Path) -> None:
    """A container's own root holds its processes, and v2 then refuses controllers: give them a leaf of their own."""
    leaf = folder / "rl360-init"
    leaf.mkdir(exist_ok=True)
    for pid in (folder / "cgroup.procs").read_text().split():
        try:
            (leaf / "cgroup.procs").write_text(pid)
        except OSError:
            continue  # it ended, or is a kernel thread


def create(hierarchy: Hierarchy, name: str, limits: Limits) -> list[str]:
    """Make the groups of one sandbox. Returns their folders, to be joined by writing a pid to `cgroup.procs`.

    Raises OSError when the kernel refuses; nothing is left behind then.
    """
    settings: dict[str, list[tuple[str, str, bool]]] = {"memory": [], "cpu": [], "pids": []}  # file, value, must work
    if limits.memory_mib:
        size = str(limits.memory_mib * 2**20)
        if hierarchy.version == 1:
            settings["memory"] = [("memory.limit_in_bytes", size, True), ("memory.memsw.limit_in_bytes", size, False)]
        else:
            settings["memory"] = [("memory.max", size, True), ("memory.swap.max", "0", False)]
    if limits.cpus:
        quota = str(int(limits.cpus * _CPU_PERIOD_US))
        if hierarchy.version == 1:
            settings["cpu"] = [("cpu.cfs_quota_us", quota, True)]
        else:
            settings["cpu"] = [("cpu.max", f"{quota} {_CPU_PERIOD_US}", True)]
    if limits.pids:
        settings["pids"] = [("pids.max", str(limits.pids), True)]

    folders: dict[str, None] = {}
    try:
        for controller, rows in settings.items():
            parent = hierarchy.parents.get(controller)
            if parent is None or not rows:
                continue
            folder = os.path.join(parent, PREFIX + name)
            if folder not in folders:
                os.mkdir(folder)
                folders[folder] = None
            for file, value, required in rows:
                _write(os.path.join(folder, file), value, required)
    except OSError:
        remove(list(folders))
        raise
    return list(folders)


def _write(path: str, value: str, required: bool) -> None:
    try:
        with open(path, "w") as file:
            file.write(value)
    except OSError:
        if required:
            raise


def join(folders: list[str]) -> None:
    """Move the calling process into the groups; "0" means the writer."""
    for folder in folders:
        with open(os.path.join(folder, "cgroup.procs"), "w") as file:
            file.write("0")


def processes(folders: list[str]) -> set[int]:
    """Pids inside the groups, empty when the groups are gone."""
    pids: set[int] = set()
    for folder in folders:
        try:
            with open(os.path.join(folder, "cgroup.procs")) as file:
                pids.update(int(pid) for pid in file.read().split())
        except OSError:
            continue
    return pids


def remove(folders: list[str]) -> list[str]:
    """Remove empty groups. Returns those that still hold processes."""
    left = []
    for folder in folders:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            left.append(folder)
    return left


def oom_kills(folders: list[str]) -> tuple[int, int]:
    """How often the kernel killed a process of these groups for memory: by their own limit, by one outside of them.

    The kernel counts both in one number, so what tells them apart is whether the own limit was ever hit. (A sandbox
    that hit its own before an outer one ended it counts as having run into its own.)
    """
    for folder in folders:
        for file in ("memory.oom_control", "memory.events"):
            try:
                with open(os.path.join(folder, file)) as lines:
                    rows = dict(line.split(None, 1) for line in lines)
            except OSError:
                continue
            kills = int(rows.get("oom_kill", "0"))
            # v2 counts in `oom` the group whose limit it was, and its ancestors.
            own = int(rows["oom"]) > 0 if "oom" in rows else _reached_its_limit(folder)
            return (kills, 0) if own else (0, kills)
    return 0, 0


def _reached_its_limit(folder: str) -> bool:
    """v1: whether charges were refused, or the most that was ever used lies just below the limit. Linux 6.18 shows no
    refused charges any more (0 after an out-of-memory kill by the group's own limit), older ones do."""
    for counter in ("memory", "memory.memsw"):
        try:
            if _number(folder, f"{counter}.failcnt"):
                return True
            limit, most = _number(folder, f"{counter}.limit_in_bytes"), _number(folder, f"{counter}.max_usage_in_bytes")
        except (OSError, ValueError):
            continue
        if most >= limit - _CHARGE_BYTES:
            return True
    return False


def _number(folder: str, file: str) -> int:
    with open(os.path.join(folder, file)) as text:
        return int(text.read())
