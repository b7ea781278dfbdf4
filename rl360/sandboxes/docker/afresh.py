"""Carries what an agent made from its ended container into a new one, and nothing else.

In: two containers of one image, and the paths that may come along. Out: what was refused. Left to others: ending the
first, so that nothing changes meanwhile, and starting the second (environment.py).

The daemon reads the old container and writes the new one; what is removed in the new one, its own untouched programs
remove. See `archives.carry` for what does not come along.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl360.sandboxes.docker import archives
from rl360.sandboxes.docker.client import DockerError, TooLarge, checked, save
from rl360.sandboxes.local.artifacts import Artifact


@dataclass(frozen=True)
class Carried:
    """One artifact on its way. archive: None when the agent removed it, or left what cannot be carried."""

    artifact: Artifact
    archive: Path | None
    refused: tuple[str, ...] = ()


async def collect(container: str, artifacts: Sequence[Artifact], scratch: Path, limit_bytes: int) -> list[Carried]:
    """What a stopped container holds of the artifacts. Raises TooLarge."""
    found = []
    for index, artifact in enumerate(artifacts):
        raw, clean = scratch / f"left{index}.tar", scratch / f"carry{index}.tar"
        try:
            await save(raw, limit_bytes, "cp", "--follow-link", f"{container}:{artifact.path}", "-")
        except DockerError:
            found.append(Carried(artifact, None))  # the agent removed it
            continue
        except TooLarge as error:
            raise TooLarge(f"{artifact.path}: the agent left {error}") from error
        limit_bytes -= raw.stat().st_size
        try:
            refused = await asyncio.to_thread(archives.carry, raw, artifact.path, clean, artifact.exclude)
        finally:
            raw.unlink()
        found.append(Carried(artifact, clean, tuple(refused)))
    return found


def removal(carried: Sequence[Carried]) -> str:
    """The command that takes the image's own version of the artifacts away, as root in the new container."""
    parts = []
    for one in carried:
        path = shlex.quote(one.artifact.path)
        if one.artifact.exclude:
            continue  # what is left out stays as the image has it, so the rest is merged into it
        if one.artifact.required:
            parts.append(f"mkdir -p {path} && find {path} -mindepth 1 -delete")
        else:
            parts.append(f"rm -rf {path}")
    return " && ".join(parts) or "true"


async def restore(container: str, carried: Sequence[Carried]) -> None:
    """Unpack the artifacts in the new container. Raises DockerError."""
    for one in carried:
        if one.archive is not None:
            await checked("cp", "-", f"{container}:/", stdin=one.archive)
            one.archive.unlink()
