"""Where requests wait while engines must be left alone: for new weights, or because their memory is the trainer's.

In: requests on their way to an engine; `close` and `open`. Out: none passes while the gate is closed, and it is known
how many are on the other side. Left to others: what ends those (an engine that aborts, or time), whose clocks stop
meanwhile (engine_pool.py). One event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._changed = asyncio.Event()  # somebody came back
        self.num_inside = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def until_open(self) -> None:
        """Whoever goes on without waiting for anything else finds it open still."""
        while not self._opened.is_set():
            await self._opened.wait()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around one request to an engine."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
            self._changed.set()

    async def until_empty(self, timeout_s: float) -> int:
        """Wait for all that are inside; returns how many are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_inside:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.num_inside
