"""What the sandboxes of one process share: what their daemon can do, one build of an image at a time, a network.

In: the docker command. Out: answers that are asked for once. Left to others: one sandbox (environment.py).
"""

from __future__ import annotations

import asyncio
import logging

from harbor.environments.base import SandboxBuildFailedError

from rl360.sandboxes.docker import abilities, leftovers
from rl360.sandboxes.docker.client import DockerError, docker
from rl360.sandboxes.docker.container import CALL_TIMEOUT_S
from rl360.sandboxes.docker.recipe import SHARED_NETWORK, SHARED_NETWORK_OPTIONS


class Daemon:
    """The daemon as this process knows it. The first sandbox asks, and removes what killed runs left."""

    def __init__(self) -> None:
        self.disk_quota = False
        self._asked = False
        self._lock = asyncio.Lock()
        self._builds: dict[str, asyncio.Lock] = {}

    async def ask(self, logger: logging.Logger) -> None:
        """Raises SandboxBuildFailedError that says what is missing and what to do."""
        async with self._lock:
            if self._asked:
                return
            found = await asyncio.to_thread(abilities.probe)
            if missing := abilities.problems(found):
                raise SandboxBuildFailedError("; ".join(missing))
            self.disk_quota = not any(a.name == "docker disk limit" for a in found)
            for warning in abilities.warnings(found):
                logger.warning(warning)
            if removed := await leftovers.sweep():
                logger.warning("removed %d containers of runs that were killed", removed)
            self._asked = True

    def building(self, tag: str) -> asyncio.Lock:
        return self._builds.setdefault(tag, asyncio.Lock())


# Harbor makes environments from an import path and JSON keywords, so what they share in a process is found here. By
# event loop: its locks belong to one.
_daemons: dict[asyncio.AbstractEventLoop, Daemon] = {}


def daemon() -> Daemon:
    """The one of this process."""
    loop = asyncio.get_running_loop()
    if loop not in _daemons:
        _daemons.clear()
        _daemons[loop] = Daemon()
    return _daemons[loop]


async def image_id(name: str) -> str | None:
    """Its id, or None when the daemon does not have it."""
    done = await docker("image", "inspect", "--format", "{{.Id}}", name, timeout_s=CALL_TIMEOUT_S)
    return done.stdout.strip() if done.return_code == 0 else None


async def make_shared_network() -> None:
    """The network of sandboxes that may have one. It stays. Raises DockerError."""
    options = (*SHARED_NETWORK_OPTIONS, "--label", "rl360.network=shared")
    done = await docker("network", "create", *options, SHARED_NETWORK, timeout_s=CALL_TIMEOUT_S)
    if done.return_code != 0 and "already exists" not in done.stderr:
        raise DockerError(f"docker network create: {done.message}")
