"""Work on a sandbox's files in a thread, which nobody can stop.

In: descriptors of a sandbox's folders, and what to do with them. Out: what that returns. Left to others: what is done
(transfer.py, artifacts.py). A caller that is cancelled goes on at once and closes its descriptors, and the kernel gives
their numbers to the next sandbox of this process: so the thread has duplicates of its own. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping


async def in_thread[K, T](fds: Mapping[K, int], call: Callable[[dict[K, int]], T]) -> T:
    """`call` with duplicates of `fds`, under the same keys, that are closed when it returns."""
    taken = [{key: os.dup(fd) for key, fd in fds.items()}]  # whoever takes them out closes them

    def run() -> T:
        own = taken.pop()
        try:
            return call(own)
        finally:
            _close(own)

    try:
        return await asyncio.to_thread(run)
    finally:
        with contextlib.suppress(IndexError):  # cancelled before there was a thread for it
            _close(taken.pop())


def _close[K](fds: Mapping[K, int]) -> None:
    for fd in fds.values():
        os.close(fd)
