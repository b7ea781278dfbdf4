"""Sandboxes as Docker containers: Harbor's Docker environment with limits, offline images and a fast end.

`DockerSandbox` is imported on first use, because it imports Harbor; the other modules need only the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl360.sandboxes.docker.environment import DockerSandbox

__all__ = ["DockerSandbox"]


def __getattr__(name: str) -> Any:
    if name == "DockerSandbox":
        from rl360.sandboxes.docker.environment import DockerSandbox

        return DockerSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
