"""Containers that a killed run left: found by their labels and removed at the next start.

In: the daemon's list. Out: labels for new containers, and how many old ones were removed. Left to others: the clean end
of a live trial. A container's label names its owner: host, boot, process id and start time. An owner on another host,
which may share the daemon, is left alone. Standard library only.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rl360.sandboxes.docker.client import checked
from rl360.sandboxes.local.cleanup import process_start

OWNER, RUN = "rl360.owner", "rl360.run"
_PROJECT = "com.docker.compose.project"


def owner() -> str:
    """This process, so that no other one is ever taken for it."""
    return _name(os.getpid(), process_start(os.getpid()))


def _name(pid: int, start: int | None) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{pid}/{start}"


def is_dead(label: str) -> bool:
    """Whether the process that a label names is gone for certain."""
    host, _, rest = label.partition("/")
    if host != socket.gethostname() or rest.count("/") != 2:
        return False
    pid = int(rest.split("/")[1])
    return _name(pid, process_start(pid)) != label


async def sweep() -> int:
    """Remove the containers of owners that no longer run, with their volumes and networks. Returns how many."""
    form = f'{{{{.ID}}}}\t{{{{.Label "{OWNER}"}}}}\t{{{{.Label "{_PROJECT}"}}}}'
    rows = (await checked("ps", "--all", "--filter", f"label={OWNER}", "--format", form)).splitlines()
    dead = [row.split("\t") for row in rows if is_dead(row.split("\t")[1])]
    for project in sorted({row[2] for row in dead}):
        await remove_project(project)
    return len(dead)


async def containers(project: str) -> list[str]:
    """Ids of a trial's containers, running or not. Raises DockerError."""
    return (await checked("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={_PROJECT}={project}")).split()


async def remove_project(project: str, services: bool = True) -> None:
    """Remove everything of one trial. `services`: it may have networks and named volumes too. Raises DockerError."""
    label = f"label={_PROJECT}={project}"
    if found := await containers(project):
        await checked("rm", "--force", "--volumes", *found)
    for kind in ("network", "volume") if services else ():
        if found := (await checked(kind, "ls", "--quiet", "--filter", label)).split():
            await checked(kind, "rm", *found)
