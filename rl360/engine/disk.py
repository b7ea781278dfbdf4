"""A full disk: recognised wherever it was met, said with what is needed, with room left to write down how far it was.

In: the run folder, the error that ended the run. Out: a `DiskFull` in its place. A reserve that is taken when the run
starts is given back then, so that the summary and whatever is buffered still get there. Left to others: which files
there are, and that a resume copes with a torn end of each (frames.py, ledger.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl360.errors import DiskFull

RESERVE = ".reserve"
RESERVE_BYTES = 2**20  # summary.json, rows that are buffered, the last lines of the log
FULL_BYTES = 2**18  # with less left, whatever failed failed for that: libraries often do not say
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "StorageFull")  # in other languages' errors
MIB = 2**20


def is_full(error: BaseException | None, folder: Path | None = None) -> bool:
    """Whether the error, or one behind it, is a full disk's; with a folder, also whether its file system is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            return True
        if any(word in str(error) for word in FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return folder is not None and shutil.disk_usage(folder).free < FULL_BYTES


@contextmanager
def reserve(run_dir: Path) -> Iterator[None]:
    """Keep some of the disk while the run lasts. Raises DiskFull where there is not even that."""
    path = run_dir / RESERVE
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
    except OSError as error:
        if is_full(error):
            raise disk_full(error, run_dir) from error  # any other: a file system that reserves nothing
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def disk_full(error: BaseException, run_dir: Path) -> DiskFull:
    """Give the reserve and what is half written back, and say what was met and what is needed."""
    usage = shutil.disk_usage(run_dir)
    (run_dir / RESERVE).unlink(missing_ok=True)
    for half_written in (run_dir / "checkpoints").glob(".tmp-*"):  # a checkpoint that will not be complete
        shutil.rmtree(half_written, ignore_errors=True)
    used = _size(run_dir)
    met = error if isinstance(error, OSError) else error.__cause__ or error.__context__
    where = getattr(met, "filename", None) or run_dir
    said = next(iter(str(error).splitlines()), "")  # a rank's error goes on with its log, which has a file of its own
    return DiskFull(
        f"{where}: the disk is full ({type(error).__name__}: {said}). {_mib(usage.free)} of {_mib(usage.total)} are "
        f"free there, and {run_dir} holds {_mib(used)}. {_needed(run_dir, used)} Free that much, or move the folder to "
        f"a larger disk, and continue with: rl360 run resume={run_dir}"
    )


@contextmanager
def unless_full(folder: Path) -> Iterator[None]:
    """For the last things of a run: one that the disk has no room for is left out, the others still come."""
    try:
        yield
    except Exception as error:
        if not is_full(error, folder):
            raise
        logging.getLogger(__name__).warning("left out, the disk is full: %s", error)


class LogFile(logging.FileHandler):
    """A log that a full disk leaves with a gap; any other log would print a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        import sys

        if not is_full(sys.exc_info()[1]):
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            if not is_full(error):
                raise


def _needed(run_dir: Path, used: int) -> str:
    """What the run still needs, by its own forecast."""
    with suppress(OSError, ValueError, KeyError):
        parts: dict[str, int] = json.loads((run_dir / "plan.json").read_text())["disk_bytes"]
        more = max(RESERVE_BYTES, sum(parts.values()) - used)
        names = ", ".join(f"{name.replace('_', ' ')} {_mib(size)}" for name, size in parts.items())
        return f"The whole run was forecast at {_mib(sum(parts.values()))} ({names}): about {_mib(more)} more."
    return "How much it will need was not forecast; a checkpoint is written before an older one goes."


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
