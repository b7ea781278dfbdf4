"""Sandboxes at Daytona: Harbor's Daytona environment with a key and an address from the configuration, and patience.

`DaytonaSandbox` is imported on first use, because it imports Harbor; the other modules need only the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl360.sandboxes.daytona.environment import DaytonaSandbox

__all__ = ["DaytonaSandbox"]


def __getattr__(name: str) -> Any:
    if name == "DaytonaSandbox":
        from rl360.sandboxes.daytona.environment import DaytonaSandbox

        return DaytonaSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
