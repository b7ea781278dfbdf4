"""Which paths an agent may hand to the verifier: what the tests run with is none of them.

In: paths that a task or an environment names. Out: `Artifact`s, and why some cannot be any. Left to others: copying.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

# What the tests run with. An artifact may be none of these, hold none of them, and not be inside the first ones.
_PROGRAMS = (
    "/bin", "/boot", "/dev", "/lib", "/lib32", "/lib64", "/libx32", "/logs/verifier", "/proc", "/sbin", "/sys",
    "/tests", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/local/bin", "/usr/local/lib",
    "/usr/local/sbin", "/usr/sbin", "/.rl360",
)  # fmt: skip
_SYSTEM = (*_PROGRAMS, "/etc", "/run", "/var")


@dataclass(frozen=True)
class Artifact:
    """A path that comes along. `required`: a folder that exists afterwards in any case (the working directory)."""

    path: str
    exclude: tuple[str, ...] = ()  # shell patterns of names or of paths below it
    required: bool = False


def problems_of(paths: Sequence[str]) -> list[str]:
    """Why some paths cannot be artifacts; empty when all can."""
    found = []
    for path in paths:
        clean = posixpath.normpath(path)
        if not clean.startswith("/") or clean.startswith("//"):
            found.append(f"artifact {path!r}: expected an absolute path")
        elif any(is_below(s, clean) for s in _SYSTEM) or any(is_below(clean, p) for p in _PROGRAMS):
            found.append(f"artifact {path!r}: it holds, or is part of, the system that the tests run in")
    return found


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def covers(artifacts: Sequence[Artifact], path: str) -> bool:
    """Whether the path comes along."""
    return any(is_below(path, posixpath.normpath(a.path)) for a in artifacts)
