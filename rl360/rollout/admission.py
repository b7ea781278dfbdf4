"""What work may start, and which of it first.

In: how far training is, how stale a group may be; attempts that want a slot. Out: up to which iteration groups are
submitted, and slots in order of urgency. Left to others: running anything (queue.py), training (the loop).

Staleness is bounded here and nowhere else. An iteration's groups are submitted at most `max_staleness` iterations
before it, a version lasts at least one iteration, and iterations are trained in order, each when all its groups are
there: so no token is older than `max_staleness` versions when it is trained on, and no attempt is thrown away or passed
over for being slow. docs/decisions/0013-order-of-asynchronous-training.md says why in this order.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def admitted_before(iteration: int, max_staleness: int, iterations: int) -> int:
    """The first iteration whose groups may not be submitted yet while `iteration` is to be trained next."""
    return min(iteration + max_staleness + 1, iterations)


class Slots:
    """`count` slots; of those that wait, the least priority gets the next free one, the earlier one among equals.

    A plain semaphore would send the second try of an old attempt behind every attempt that was submitted since.
    For one event loop.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def slot(self, priority: tuple[int, ...]) -> AsyncIterator[None]:
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: tuple[int, ...]) -> None:
        if self._free:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted and cancelled in the same turn of the loop
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1
