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

from rl360.sandboxes.artifact_paths import Artifact
from rl360.sandboxes.docker import archives
from rl360.sandboxes.docker.client import CALL_TIMEOUT_S, DaemonError, DockerError, TooLarge, checked, save

_MAX_NAMES = 20


@dataclass(frozen=True)
class OnItsWay:
    """One artifact on its way. archive: None when the agent removed it, or left what cannot be carried."""

    artifact: Artifact
    archive: Path | None
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusals:
    """What did not come along; `refused` holds the first ones."""

    num_refused: int
    refused: tuple[str, ...]

    @classmethod
    def of(cls, carried: Sequence[OnItsWay]) -> Refusals:
        names = [f"{one.artifact.path}/{path}" for one in carried for path in one.refused]
        return cls(len(names), tuple(names[:_MAX_NAMES]))


async def collect(container: str, artifacts: Sequence[Artifact], scratch: Path, limit_bytes: int) -> list[OnItsWay]:
    """What a stopped container holds of the artifacts. Raises TooLarge, and DockerError when the daemon fails."""
    found = []
    for index, artifact in enumerate(artifacts):
        raw, clean = scratch / f"left{index}.tar", scratch / f"carry{index}.tar"
        try:
            await _save(raw, limit_bytes, container, artifact.path)
        except DaemonError:
            raise
        except DockerError:
            await checked("inspect", container, timeout_s=CALL_TIMEOUT_S)  # a daemon that fails has said nothing of it
            found.append(OnItsWay(artifact, None))  # the agent removed it
            continue
        except TooLarge as error:
            raise TooLarge(f"{artifact.path}: the agent left {error}") from error
        limit_bytes -= raw.stat().st_size
        try:
            refused = await asyncio.to_thread(archives.carry, raw, artifact.path, clean, artifact.exclude)
        finally:
            raw.unlink()
        found.append(OnItsWay(artifact, clean, tuple(refused)))
    return found


async def _save(target: Path, limit_bytes: int, container: str, path: str) -> None:
    """Twice, where it fails: what a daemon or its client fails with now and then must not pass for a missing path."""
    arguments = ("cp", "--follow-link", f"{container}:{path}", "-")
    try:
        await save(target, limit_bytes, *arguments)
    except DockerError:
        await save(target, limit_bytes, *arguments)


def removal(carried: Sequence[OnItsWay]) -> str:
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


async def restore(container: str, carried: Sequence[OnItsWay]) -> None:
    """Unpack the artifacts in the new container. Raises DockerError."""
    for one in carried:
        if one.archive is not None:
            await checked("cp", "-", f"{container}:/", stdin=one.archive)
            one.archive.unlink()
