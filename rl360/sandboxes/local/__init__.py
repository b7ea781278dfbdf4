"""Local sandboxes: bubblewrap, overlayfs and cgroups, one Harbor environment per trial, no daemon and no Docker.

`LocalSandbox` is imported on first use, because it imports Harbor; the other modules need only the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl360.sandboxes.local.environment import LocalSandbox

__all__ = ["LocalSandbox"]


def __getattr__(name: str) -> Any:
    if name == "LocalSandbox":
        from rl360.sandboxes.local.environment import LocalSandbox

        return LocalSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
