"""How many sandboxes are open at once, over all processes of this host.

In: a folder and a number. Out: a slot, held as the lock of a file, so that a process that is killed gives its slots
back at once. Left to others: what a slot is for (environment.py). Standard library only.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import time
from pathlib import Path

_LOOK_AGAIN_S = 0.2


class NoFreeSlot(RuntimeError):
    """All slots stayed taken for as long as the caller would wait."""


class Slot:
    """One open sandbox. `release` may be called twice."""

    def __init__(self, fd: int):
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


async def take(folder: Path, count: int, wait_s: float) -> Slot:
    """A free slot of `count`. Raises NoFreeSlot after `wait_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait_s
    while True:
        for number in range(count):
            fd = os.open(folder / f"{number}.slot", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            return Slot(fd)
        if time.monotonic() > until:
            raise NoFreeSlot(f"all {count} sandboxes stayed in use for {wait_s:g} s")
        await asyncio.sleep(_LOOK_AGAIN_S * (1 + random.random()))
