"""What the Docker daemon at hand can do for sandboxes. For check and doctor.

In: the docker command. Out: one `Ability` for each thing that is needed or wished for, with the reason when it lacks
and what to do about it. Imports neither Harbor nor torch. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from rl360.sandboxes.abilities import Ability

_TIMEOUT_S = 10.0
_QUOTA_DRIVERS = {"btrfs", "zfs", "windowsfilter"}


@dataclass(frozen=True)
class Daemon:
    """Of `docker info`."""

    version: str
    storage: str
    backing: str  # file system below the storage, lower case; empty when it is not told
    limits: frozenset[str]  # memory | cpu | pids

    @property
    def may_limit_disk(self) -> bool:
        """Whether a container's disk can be limited. On xfs only with project quotas, which only a try tells."""
        return self.storage in _QUOTA_DRIVERS or (self.storage == "overlay2" and self.backing == "xfs")


def parse_info(text: str) -> Daemon:
    """What `docker info --format '{{json .}}'` printed. Raises ValueError when no daemon answered."""
    info = json.loads(text)
    if info.get("ServerErrors") or not info.get("ServerVersion"):
        raise ValueError("; ".join(info.get("ServerErrors") or ["no daemon answers"]))
    status = {row[0]: row[1] for row in info.get("DriverStatus") or [] if len(row) == 2}
    names = {"memory": "MemoryLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}
    limits = frozenset(name for name, key in names.items() if info.get(key))
    return Daemon(info["ServerVersion"], info.get("Driver", ""), status.get("Backing Filesystem", "").lower(), limits)


def _run(*command: str) -> tuple[int, str, str]:
    try:
        done = subprocess.run(["docker", *command], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {_TIMEOUT_S:g} s"
    return done.returncode, done.stdout, done.stderr.strip()


def probe() -> tuple[Ability, ...]:
    """Ask once. Takes about 0.3 s with a daemon at hand, at most 30 s without an answer."""
    if shutil.which("docker") is None:
        return (Ability("docker", False, True, "docker is not on the PATH", "install Docker, or use sandbox=local"),)
    try:
        code, out, err = _run("info", "--format", "{{json .}}")
        daemon = parse_info(out)
    except ValueError as error:
        where = os.environ.get("DOCKER_HOST") or "the default socket"
        reason = err.splitlines()[-1] if err else str(error)
        remedy = f"start it, or set DOCKER_HOST (now: {where}); or use sandbox=local"
        return (Ability("docker daemon", False, True, reason or "no daemon answers", remedy),)
    found = [Ability("docker daemon", True, True, f"version {daemon.version}, storage {daemon.storage}")]
    for name, command, package in (
        ("docker compose", ("compose", "version", "--short"), "docker-compose-plugin (or docker-compose-v2)"),
        ("docker buildx", ("buildx", "version"), "docker-buildx-plugin (or docker-buildx)"),
    ):
        code, out, _ = _run(*command)
        good = code == 0 and not out.startswith("1.")
        detail = out.strip().splitlines()[0] if good else "missing, or older than version 2"
        found.append(Ability(name, good, True, detail, f"install {package}"))
    if lacking := sorted({"memory", "cpu", "pids"} - daemon.limits):
        detail = f"the daemon cannot limit {', '.join(lacking)}"
        found.append(Ability("docker limits", False, False, detail, "mount the control groups on its host"))
    if not daemon.may_limit_disk:
        detail = f"storage {daemon.storage} on {daemon.backing or 'an unknown file system'} has no quotas"
        remedy = "sandbox.disk_mib then limits each file, not their sum; put the daemon's data on xfs with pquota"
        found.append(Ability("docker disk limit", False, False, detail, remedy))
    return tuple(found)


def problems(abilities: tuple[Ability, ...]) -> list[str]:
    """What keeps sandboxes from starting, one line each."""
    return [f"sandbox: {a.name}: {a.detail}; {a.remedy}" for a in abilities if a.required and not a.ok]


def warnings(abilities: tuple[Ability, ...]) -> list[str]:
    """What works in a weaker way."""
    return [f"sandbox: {a.name}: {a.detail}; {a.remedy}" for a in abilities if not a.required and not a.ok]
