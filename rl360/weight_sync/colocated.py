"""Engines on the trainer's own GPUs: memory changes hands in each iteration, and the weights with it.

In: as in sync.py, and a trainer that can leave its GPUs. Out: the same reports. The order: hold and drain requests,
pause engines, wait until they are idle (a flush), release their memory, onload the trainer, step; then trim the trainer
(its allocator keeps what the step took), resume the engines' weights, send and check new ones, set the version, offload
the trainer, resume the KV cache, flush, continue, and let requests through.

An engine without memory must not be asked anything that computes: requests wait in the gateway, health checks are
suspended, and no server is started meanwhile, since a new one would take memory that the trainer has. A replacement
gets its weights by one hand-over in which all engines take part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from rl360.errors import EngineError
from rl360.protocols import Trainer
from rl360.types import SyncReport
from rl360.weight_sync.calls import Failures
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.sync import IDLE_WAIT_S, FleetSync, Push, ServingSet, Timing
from rl360.weight_sync.threads import in_thread
from rl360.weight_sync.transports import Transport

log = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class StartingSet(ServingSet, Protocol):
    """A serving set whose servers start and end. rl360.serving.fleet.Fleet is one."""

    def hold_starts(self, keep: Collection[str] = ()) -> None: ...
    def allow_starts(self) -> None: ...


class ColocatedSync(FleetSync):
    """Implements protocols.WeightSync. The trainer is offloaded while engines serve.

    Args:
        serving_set: engines that have their memory; the trainer has none when they start. `check_names` comes before.
        trainer: has `offload`, `onload` and `trim`.
        The others are FleetSync's.
    """

    def __init__(
        self,
        serving_set: StartingSet,
        transport: Transport,
        make_engine: Callable[[str], WeightEngine],
        compare_hashes: bool = True,
        *,
        trainer: Any,
        **others: Any,
    ) -> None:
        super().__init__(serving_set, transport, make_engine, compare_hashes, **others)
        self._starting = serving_set
        self._owner = trainer
        self._trainer_has_memory = False
        self._meanwhile = ExitStack()  # what lasts from the release of engines to their return
        self._failure: EngineError | None = None  # of a replacement's hand-over: engines have no memory for good

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The trainer has its memory inside, and keeps it until `sync`."""
        with self._turn:
            self._take_memory(self._set.serving())
            yield

    @contextmanager
    def resident(self, last: bool = False) -> Iterator[None]:
        with self._turn:
            had_it = self._trainer_has_memory
            self._take_memory(self._set.serving())
            yield
            if not (had_it or last):
                assert self._trainer is not None
                self.sync(self._trainer, self._version)

    def sync(self, trainer: Trainer, version: int) -> SyncReport:
        with self._turn:
            urls = self._set.serving()
            self._take_memory(urls)
            urls = tuple(url for url in urls if url in self._set.serving())  # some may have failed just now
            failures = asyncio.run(self._return_memory(trainer, version, urls))
            confirmed = tuple(url for url in urls if url not in failures)
            if not confirmed:
                self._leave_it_to_replacements(version, failures)
            self._trainer, self._version = trainer, version
            self._turn.notify_all()
        return SyncReport(version, confirmed, tuple(failures), self.timing.transfer_s, self.timing.stall_s)

    def bring_up(self, url: str) -> None:
        with self._turn:
            due = self._turn.wait_for(self._may_bring_up, self._bring_up_timeout_s)
            if self._closed or not due or self._trainer is None:
                raise EngineError("weight_version", f"{url}: there are no current weights to bring")
            if not asyncio.run(self._answers(url)):  # its memory was needed, or it died while it waited here
                raise EngineError("engine_refused", f"{url} has ended")
            urls = (*self._set.serving(), url)
            try:
                lost = self._take_memory(urls, newcomer=url)
                urls = tuple(one for one in urls if one not in lost)
                lost |= asyncio.run(self._return_memory(self._trainer, self._version, urls, newcomer=url))
            except Exception as error:  # the trainer's: what engines do wrong is in `lost`
                said = f"the hand-over of memory for {url} failed: {error!r}"
                self._failure = EngineError("weight_version", said)
                raise self._failure from error
            if url in lost:
                raise EngineError("weight_version", lost[url])

    def check(self) -> None:
        """As FleetSync's. Raises EngineError, too, when a hand-over for a replacement failed halfway."""
        if self._failure is not None:
            raise self._failure
        super().check()

    async def _answers(self, url: str) -> bool:
        engine = self._make_engine(url)
        try:
            return await engine.health()
        finally:
            await engine.close()

    def _may_bring_up(self) -> bool:
        return self._closed or (self._weights_are_current() and not self._trainer_has_memory)

    def _take_memory(self, urls: Sequence[str], newcomer: str | None = None) -> Failures:
        """Engines give their memory to the trainer; nothing, where it has it."""
        if self._failure is not None:
            raise self._failure
        if self._trainer_has_memory:
            return {}
        self._meanwhile.enter_context(self._set.suspended())
        self._meanwhile.callback(self._starting.allow_starts)
        lost = asyncio.run(self._release(urls, newcomer))
        self._starting.hold_starts([] if newcomer is None or newcomer in lost else [newcomer])
        self._owner.onload()
        self._trainer_has_memory = True
        return lost

    async def _release(self, urls: Sequence[str], newcomer: str | None) -> Failures:
        self._began = time.monotonic()
        push = Push(self._make_engine, urls, self._version, self._set.leave)
        try:
            await self._quiet(push.everyone)
            self._hold_s = time.monotonic() - self._began
            push.hurry(newcomer, self._usual_s)
            await push.everyone(lambda engine: engine.pause())
            await push.everyone(lambda engine: engine.flush(IDLE_WAIT_S))
            await push.everyone(lambda engine: engine.release_memory((KV_CACHE, WEIGHTS)), slow=True)
            self._pause_s = time.monotonic() - self._began - self._hold_s
        finally:
            await push.close()
        return push.lost

    async def _return_memory(
        self, trainer: Trainer, version: int, urls: Sequence[str], newcomer: str | None = None
    ) -> Failures:
        push = Push(self._make_engine, urls, version, self._set.leave)
        try:
            began = time.monotonic()
            await self._transport.prepare(trainer, version, push.left)
            await in_thread(self._owner.trim)
            prepared = time.monotonic()
            push.hurry(newcomer, self._usual_s)
            await push.everyone(lambda engine: engine.resume_memory((WEIGHTS,)), slow=True)
            if push.left:
                push.drop(await self._transport.send(push.left))
            sent = time.monotonic()
            if self._compare_hashes:
                push.drop(await self._differences(push.left))
            await push.everyone(lambda engine: engine.set_version(version))
            checked = time.monotonic()
            await in_thread(self._owner.offload)
            self._trainer_has_memory = False
            push.hurry(newcomer, self._usual_s)  # the trainer's way out is no fault of the engine's
            await push.everyone(lambda engine: engine.resume_memory((KV_CACHE,)), slow=True)
            await push.everyone(lambda engine: engine.flush(IDLE_WAIT_S))
            await push.everyone(lambda engine: engine.resume())
            self.timing = Timing(
                prepared - began,
                self._hold_s,
                self._pause_s,
                sent - prepared,
                checked - sent,
                time.monotonic() - self._began,
            )
            if push.left:
                self._usual_s = checked - began
        finally:
            if not self._trainer_has_memory:  # else the run ends: nothing may reach engines that have no memory
                self._meanwhile.close()
                if self._gate is not None:
                    await self._gate.release()
            await push.close()
        return push.lost
