"""What a container is made of: the Dockerfile's base image, and the Compose override with limits and isolation.

In: a Dockerfile's text, limits. Out: text and a mapping that Compose reads. Pure; left to others: running Compose
(environment.py). Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# Docker's default capabilities less those by which a container's root makes devices, forges packets, leaves its root
# folder or writes to the kernel's log. What installing packages needs stays.
_DROPPED = ["AUDIT_WRITE", "MKNOD", "NET_RAW", "SYS_CHROOT"]
SHARED_NETWORK = "rl360-sandboxes"
# Sandboxes share one network, because a daemon has addresses for some 30; on this one they cannot reach each other.
SHARED_NETWORK_OPTIONS = ("--opt", "com.docker.network.bridge.enable_icc=false")

# The container ends itself, also when nobody is left to end it. It needs the image's bash, as every command does. Its
# first process is this shell and not Docker's init: nothing inside can end that, it adopts and reaps what is orphaned,
# and it tells the end of its time from the end of its child by something inside.
_KEEPER = 'trap "" HUP INT QUIT TERM; sleep {lifetime_s} && exit 0; exit {ended_inside}'
ENDED_INSIDE = 3  # its exit code then

_FROM = re.compile(r"^(\s*FROM\s+(?:--\S+\s+)*)(\S+)(\s+AS\s+(\S+))?\s*$", re.IGNORECASE)
_FRONTEND = re.compile(r"^#\s*syntax\s*=", re.IGNORECASE)


def on_base(dockerfile: str, base: str) -> str:
    """The Dockerfile with `base` in place of every image that it takes from a registry.

    A `# syntax=` line goes too: it names an image that would be fetched.
    """
    stages: set[str] = set()
    lines = []
    continued = False
    for line in dockerfile.splitlines():
        found = None if continued else _FROM.match(line)
        if found:
            if found[2].lower() not in {*stages, "scratch"}:
                line = f"{found[1]}{base}{found[3] or ''}"
            if found[4]:
                stages.add(found[4].lower())
        if not _FRONTEND.match(line):
            lines.append(line)
        continued = line.rstrip().endswith("\\") and not line.lstrip().startswith("#")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Limits:
    """0: no limit. `disk_quota`: the daemon's storage can limit a container's disk; else each file is limited."""

    memory_mib: int
    cpus: float
    pids: int
    disk_mib: int
    disk_quota: bool


@dataclass(frozen=True)
class Recipe:
    """What the override says of the service `main`. `services`: the task brings a Compose file of its own."""

    limits: Limits
    labels: dict[str, str]
    lifetime_s: float
    network: bool
    services: bool
    image: str | None  # the name of what is built; None: the task names a ready image
    dockerfile: str | None  # path of a rewritten Dockerfile; None: the task's own
    build_network: bool
    ready_image: str | None = None  # in place of the ready image that the task names
    runtime: str | None = None  # the daemon's runtime, such as runsc (gVisor); None: its default

    def compose(self) -> dict[str, Any]:
        """The override, read after every other Compose file of the task."""
        limits = self.limits
        main: dict[str, Any] = {
            "init": self.services,
            "stop_grace_period": "0s",
            "labels": self.labels,
            "hostname": "sandbox",
            "cap_drop": _DROPPED,
            "security_opt": ["no-new-privileges:true"],
        }
        if not self.services:
            keeper = _KEEPER.format(lifetime_s=self.lifetime_s, ended_inside=ENDED_INSIDE)
            main["command"] = ["bash", "-c", keeper]
        if self.runtime:
            main["runtime"] = self.runtime
        if limits.memory_mib:
            main |= {"mem_limit": f"{limits.memory_mib}m", "memswap_limit": f"{limits.memory_mib}m"}
        if limits.cpus:
            main["cpus"] = limits.cpus
        if limits.pids:
            main["pids_limit"] = limits.pids
        if limits.disk_mib and limits.disk_quota:
            main["storage_opt"] = {"size": f"{limits.disk_mib}m"}
        elif limits.disk_mib:
            main["ulimits"] = {"fsize": limits.disk_mib * 2**20}
        if self.image is not None:
            build: dict[str, Any] = {"labels": {"rl360.image": "task"}}
            if self.dockerfile is not None:
                build["dockerfile"] = self.dockerfile
            if not self.build_network:
                build["network"] = "none"
            main |= {"image": self.image, "pull_policy": "never", "build": build}
        elif self.ready_image is not None:
            main |= {"image": self.ready_image, "pull_policy": "never"}
        return {"services": {"main": main}, **self._networks(main)}

    def _networks(self, main: dict[str, Any]) -> dict[str, Any]:
        if self.services:  # its services talk to each other; without network they reach nothing else
            return {"networks": {"default": {"internal": not self.network, "labels": self.labels}}}
        if not self.network:
            main["network_mode"] = "none"
            return {}
        return {"networks": {"default": {"name": SHARED_NETWORK, "external": True}}}
