"""What the sandboxes of one process share, found by where they keep their files.

In: a cache folder, the base root file system, whether user namespaces are wanted. Out: a `Host`, made on the first
call. Left to others: one sandbox (environment.py). Harbor makes environments from an import path and JSON keywords, so
what they share cannot be passed in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from harbor.environments.base import SandboxBuildFailedError

from rl360.sandboxes import abilities
from rl360.sandboxes.local import cgroups, rootfs
from rl360.sandboxes.local.keeper_client import Keeper


@dataclass
class Host:
    """What the sandboxes of one process share: a base root file system, control groups, a keeper."""

    base: rootfs.Base
    hierarchy: cgroups.Hierarchy
    mode: str
    userns: bool
    cache_dir: Path
    keeper: Keeper
    run_id: str
    _killed: list[Keeper] = field(default_factory=list)

    def fresh_keeper(self) -> Keeper:
        """The keeper, another one if it was killed. The folder of that one stays: a disk in it may still be read."""
        if not self.keeper.alive:
            self._killed.append(self.keeper)
            self.keeper = Keeper(self.cache_dir / "owners", self.run_id, self.hierarchy)
        return self.keeper

    def close(self) -> None:
        """End every sandbox and remove what they own."""
        for keeper in (self.keeper, *self._killed):
            keeper.close()


_hosts: dict[tuple[str, str, bool], Host] = {}
_hosts_lock = threading.Lock()


def open_host(cache_dir: Path, base: str, unprivileged: bool, run_id: str) -> Host:
    """The shared host of this process; made, and leftovers of killed runs removed, on the first call.

    Raises SandboxBuildFailedError that says what is missing and what to do.
    """
    key = (str(cache_dir), base, unprivileged)
    with _hosts_lock:
        if key not in _hosts:
            report = abilities.probe(unprivileged=unprivileged)
            if report.problems:
                raise SandboxBuildFailedError("; ".join(report.problems))
            try:
                root = rootfs.resolve(base, cache_dir)
            except rootfs.BaseError as error:
                raise SandboxBuildFailedError(str(error)) from error
            hierarchy = cgroups.find()
            keeper = Keeper(cache_dir / "owners", run_id, hierarchy)
            _hosts[key] = Host(root, hierarchy, report.root_mode, report.userns, cache_dir, keeper, run_id)
        return _hosts[key]


def close_hosts() -> None:
    """End every sandbox of this process and remove what it owns."""
    with _hosts_lock:
        while _hosts:
            _hosts.popitem()[1].close()
