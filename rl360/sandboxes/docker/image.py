"""A task's image: built once for each content, on a base that is here already.

In: a tag that names the content, and a way to run Compose. Out: an image of that tag at the daemon. Raises
SandboxBuildFailedError. Left to others: what is built (recipe.py), which tag that is (environment.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from harbor.environments.base import SandboxBuildFailedError

from rl360.sandboxes.docker import host
from rl360.sandboxes.docker.client import Done

_SHOWN_LINES = 15  # of a failed build's output


async def base_id(base: str) -> str:
    """The id of the image that stands in for every FROM; empty without one."""
    if not base:
        return ""
    found = await host.image_id(base)
    if found is None:
        raise SandboxBuildFailedError(
            f"sandbox.base: no image {base} at the daemon; docker pull, load or import it, or use auto"
        )
    return found


async def ensure(
    tag: str, compose: Callable[..., Awaitable[Done]], timeout_s: float, *, force: bool, has_base: bool
) -> None:
    """Build what the daemon does not have. One build of a tag at a time; `compose` runs with the same time-out."""
    async with host.daemon().building(tag):
        if not force and await host.image_id(tag) is not None:
            return
        try:
            done = await compose("build", *(("--no-cache",) if force else ()), "main")
        except TimeoutError:
            raise SandboxBuildFailedError(f"the image was not built in {timeout_s} s") from None
        if done.return_code != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_SHOWN_LINES:])
            hint = "" if has_base else "; without a registry, set sandbox.base to an image that is here"
            raise SandboxBuildFailedError(f"docker compose build failed{hint}:\n{said}")
