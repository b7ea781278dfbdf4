"""One synchronisation: every engine of the serving set gets the trainer's weights, checked, before any generates again.

In: the trainer after its step, the version of its weights, the serving set. Out: a `SyncReport`, or `EngineError` when
no engine is left. The order: prepare while engines generate; hold new requests in the gateway; wait for those that run
(drain), or have them handed back with their partial ids, from which the session proxy asks again (interrupt); pause;
transfer; compare hashes; forget cached prefixes; set the version; continue, and let requests through.

Pausing SGLang 0.5.16 looks once a second whether requests are gone. None is there any more when it is paused here, so
it does not wait.

An engine that fails at any of these, or hangs, leaves the set first and is replaced, not waited for. A replacement gets
the current weights through `bring_up` before it serves, soon or not at all: the trainer waits meanwhile. When all have
died or hang, the version still advances: the first replacement brings it. Engines that nobody can replace (`external`),
and weights that no engine takes, end the run instead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from rl360.errors import CheckpointError, EngineError
from rl360.protocols import Trainer
from rl360.types import SyncReport
from rl360.weight_sync.buckets import Expectation
from rl360.weight_sync.calls import SLOW, TIMES_THE_FIRST, Failures, each, restart_helps
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.names import name_problem
from rl360.weight_sync.transports import Transport

log = logging.getLogger(__name__)

QUOTED_PROBLEMS = 5
INTERRUPT, DRAIN = "interrupt", "drain"
ABORT_POLL_S = 0.25  # between two aborts: a request that was on its way to the engine missed the first
IDLE_WAIT_S = 10.0  # for the step that an engine still computes for requests which have ended
ABORT_WAIT_S = 5.0  # then the pause, which waits for what runs, has to do


class ServingSet(Protocol):
    """Who must confirm a version. rl360.serving.fleet.Fleet is one."""

    def serving(self) -> tuple[str, ...]: ...
    def leave(self, url: str, reason: str) -> None: ...
    def hopeless(self) -> str | None: ...  # why nobody in it will ever serve again; None: somebody may
    def suspended(self) -> AbstractContextManager[None]: ...
    def on_change(self, tell: Callable[[tuple[str, ...]], None]) -> None: ...


class Gate(Protocol):
    """Keeps requests from engines. rl360.protocols.Gateway is one."""

    async def hold(self) -> None: ...
    async def idle(self, timeout_s: float) -> int: ...
    async def release(self) -> None: ...


Everyone = Callable[[Callable[[WeightEngine], Awaitable[object]]], Awaitable[None]]


class FixedSet:
    """Servers that somebody else started: none can be replaced, so the first that fails ends the run."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def serving(self) -> tuple[str, ...]:
        return self._urls

    def leave(self, url: str, reason: str) -> None:
        raise EngineError(
            "weight_version", f"{url} did not take the new weights, and nobody here can replace it: {reason}"
        )

    def hopeless(self) -> str | None:
        return None

    def suspended(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_change(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        """It never does."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of the last synchronisation, seconds. `stall_s` is from the hold to the last continue, `hold_s` the part of it
    until no request was on an engine."""

    prepare_s: float
    hold_s: float
    pause_s: float
    transfer_s: float
    check_s: float
    stall_s: float


class Push:
    """The engines of one synchronisation: those that fail at a step are left behind, and take part in no further one.

    leave: is told of each; None: nobody is.
    """

    def __init__(
        self,
        make_engine: Callable[[str], WeightEngine],
        urls: Sequence[str],
        version: int,
        leave: Callable[[str, str], None] | None,
    ) -> None:
        self._engines = [make_engine(url) for url in urls]
        self._version = version
        self._leave = leave
        self.lost: Failures = {}

    @property
    def left(self) -> list[WeightEngine]:
        return [engine for engine in self._engines if engine.url not in self.lost]

    async def everyone(self, call: Callable[[WeightEngine], Awaitable[object]], slow: bool = False) -> None:
        self.drop(await each(self.left, call, slow))

    def hurry(self, url: str | None, usual_s: float) -> None:
        """A replacement that needs much longer than `usual_s`, which all engines needed together, hangs: its calls end
        then. Nothing for None."""
        for engine in self._engines:
            if engine.url == url and engine.straggler_s is not None:
                engine.end_in(SLOW * engine.straggler_s + TIMES_THE_FIRST * usual_s)

    def drop(self, failures: Failures) -> None:
        for url, reason in failures.items():
            self.lost[url] = reason
            log.error("version %d: %s leaves the serving set: %s", self._version, url, reason)
            if self._leave is not None:
                self._leave(url, f"version {self._version}: {reason}")

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class FleetSync:
    """Implements protocols.WeightSync.

    Args:
        serving_set: the engines; it is told of those that failed.
        transport: how tensors travel.
        make_engine: builds a client inside the event loop that uses it.
        compare_hashes: whether engines are asked for hashes of what they hold, and compared with what was sent.
        bring_up_timeout_s: how long a replacement waits for a synchronisation that is due before it.
        mode: interrupt: requests that run are handed back and resumed under new weights; drain: they are waited for.
        drain_timeout_s: at most so long; what then still runs is interrupted.
        model_dir: its config.json says which tensors the model has; None: what the trainer sends is not compared.
    """

    def __init__(
        self,
        serving_set: ServingSet,
        transport: Transport,
        make_engine: Callable[[str], WeightEngine],
        compare_hashes: bool = True,
        bring_up_timeout_s: float = 600.0,
        mode: str = INTERRUPT,
        drain_timeout_s: float = 60.0,
        model_dir: Path | None = None,
    ) -> None:
        self._set = serving_set
        self._transport = transport
        self._make_engine = make_engine
        self._compare_hashes = compare_hashes
        self._bring_up_timeout_s = bring_up_timeout_s
        self._mode = mode
        self._drain_timeout_s = drain_timeout_s
        self._model_dir = model_dir
        self._names_checked = model_dir is None
        self._gate: Gate | None = None
        self._trainer: Trainer | None = None
        self._version = -1
        self._closed = False
        self._held: dict[str, str] = {}  # by engine, one hash of all that it holds
        self._told_limit = False  # that not every tensor can be compared with what was sent
        self._usual_s = 0.0  # that the last synchronisation took, beside waiting for requests
        self._turn = threading.Condition(threading.RLock())  # weights are still while it is held
        self.timing = Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The trainer changes its weights inside: no replacement reads them meanwhile."""
        with self._turn:
            yield

    @contextmanager
    def resident(self, last: bool = False) -> Iterator[None]:
        """The trainer has memory of its own, always. Inside nobody else asks its ranks for weights: two calls at once
        may reach them in different orders, and then each waits for the others for good."""
        with self._turn:
            yield

    def check_names(self, trainer: Trainer, version: int) -> None:
        """Once, before any engine is paused: the trainer sends every tensor that the model has, and no other.

        Hashes cannot tell: an engine of a tied model holds a head that nobody sends, one of another model needs it.
        Raises CheckpointError naming what lacks and what is too much.
        """
        if self._names_checked:
            return
        assert self._model_dir is not None
        sent = asyncio.run(self._transport.names(trainer, version))
        if problem := name_problem(sent, self._model_dir):
            raise CheckpointError(f"{type(trainer).__name__} publishes other weights than the model's: {problem}")
        self._names_checked = True

    def sync(self, trainer: Trainer, version: int) -> SyncReport:
        self.check_names(trainer, version)
        with self._turn:
            urls = self._set.serving()
            failures = asyncio.run(self._push(trainer, version, urls)) if urls else {}
            confirmed = tuple(url for url in urls if url not in failures)
            if not confirmed:
                self._leave_it_to_replacements(version, failures)
            self._trainer, self._version = trainer, version
            self._turn.notify_all()
        return SyncReport(version, confirmed, tuple(failures), self.timing.transfer_s, self.timing.stall_s)

    def bring_up(self, url: str) -> None:
        """Give one replacement the version that the others serve. Raises EngineError when it does not take it."""
        with self._turn:
            due = self._turn.wait_for(self._weights_are_current, self._bring_up_timeout_s)
            if self._closed or not due or self._trainer is None:
                raise EngineError("weight_version", f"{url}: there are no current weights to bring")
            failures = asyncio.run(self._push(self._trainer, self._version, (url,), replacing=True))
            if failures:
                raise EngineError("weight_version", failures[url])

    def check(self) -> None:
        """Raises EngineError when no engine will ever serve again."""
        if (why := self._set.hopeless()) is not None:
            raise EngineError("engine_start", f"no engine is left, and none will be started again: {why}")

    def on_change(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        """`tell(serving set)` whenever an engine leaves it or joins it."""
        self._set.on_change(tell)

    def hold_requests_at(self, gateway: Gate) -> None:
        """Where requests wait while engines are paused. Without it only the pause itself keeps them away."""
        self._gate = gateway

    def fingerprint(self) -> str | None:
        """Of what the engines said after the last synchronisation that they hold; None: hashes are not compared."""
        serving = self._set.serving()
        return " ".join(sorted({whole for url, whole in self._held.items() if url in serving})) or None

    def close(self) -> None:
        """Nobody waits for weights from here on."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        asyncio.run(self._transport.close())

    def _leave_it_to_replacements(self, version: int, failures: Failures) -> None:
        """Nobody has the version; whoever is started again gets it first. Raises where that cannot be expected."""
        if self._trainer is None:
            said = f"no engine took version {version}: {_joined(failures)}" if failures else "no engine serves"
            raise EngineError("weight_version", f"{said}; the first weights reach nobody")
        if any(not restart_helps(reason) for reason in failures.values()):
            raise EngineError("weight_version", f"no engine took version {version}: {_joined(failures)}")
        self.check()
        log.error("version %d: no engine is left; requests wait until a replacement has it", version)

    def _weights_are_current(self) -> bool:
        """Between a step and its synchronisation the trainer is ahead of what is served."""
        return self._closed or (self._trainer is not None and self._trainer.version == self._version)

    async def _push(self, trainer: Trainer, version: int, urls: Sequence[str], replacing: bool = False) -> Failures:
        push = Push(self._make_engine, urls, version, None if replacing else self._set.leave)
        everyone = push.everyone
        try:
            marks = [time.monotonic()]
            newcomer = urls[0] if replacing else None
            push.hurry(newcomer, self._usual_s)
            await self._transport.prepare(trainer, version, push.left)
            push.hurry(newcomer, self._usual_s)  # what the trainer itself prepared is no fault of the engine's
            marks.append(time.monotonic())
            with self._set.suspended():
                if not replacing:
                    await self._quiet(everyone)
                marks.append(time.monotonic())
                await everyone(lambda engine: engine.pause())
                marks.append(time.monotonic())
                push.drop(await self._transport.send(push.left))
                marks.append(time.monotonic())
                if self._compare_hashes:
                    push.drop(await self._differences(push.left))
                await everyone(lambda engine: engine.flush(IDLE_WAIT_S))
                await everyone(lambda engine: engine.set_version(version))
                marks.append(time.monotonic())
                await everyone(lambda engine: engine.resume())
            prepare_s, hold_s, pause_s, transfer_s, check_s = (after - before for before, after in pairwise(marks))
            stall_s = time.monotonic() - marks[1]
            if not replacing:
                self.timing = Timing(prepare_s, hold_s, pause_s, transfer_s, check_s, stall_s)
                if push.left:
                    self._usual_s = prepare_s + transfer_s + check_s
        finally:
            if self._gate is not None and not replacing:
                await self._gate.release()
            await push.close()
        return push.lost

    async def _quiet(self, everyone: Everyone) -> None:
        """No request is on an engine afterwards, nor comes to one until the gate opens."""
        if self._gate is None:
            return
        await self._gate.hold()
        left = await self._gate.idle(self._drain_timeout_s if self._mode == DRAIN else 0.0)
        if left and self._mode == DRAIN:
            log.warning("%d requests still run after %g s; they are interrupted", left, self._drain_timeout_s)
        deadline = time.monotonic() + ABORT_WAIT_S
        while left and time.monotonic() < deadline:
            await everyone(lambda engine: engine.abort(None))
            left = await self._gate.idle(ABORT_POLL_S)

    async def _differences(self, engines: Sequence[WeightEngine]) -> Failures:
        """Engines whose tensors are not what was sent, on any rank; and engines that differ from others of their kind:
        what cannot be foretold is only compared so."""
        reported: dict[str, tuple[tuple[tuple[int, int], ...], str]] = {}  # by engine: its ranks, one hash of them all
        failures: Failures = {}
        expectations: dict[str, Expectation | None] = {}

        async def ask(engine: WeightEngine) -> None:
            ranks, whole = await engine.checksums()
            reported[engine.url] = (tuple((of.rank, of.ways) for of in ranks), whole)
            self._held[engine.url] = whole
            kind = await engine.hash_kind()
            if kind not in expectations:
                expectations[kind] = self._transport.expectation(kind)
            expected = expectations[kind]
            limit = f"the trainer has no hashes of kind {kind}" if expected is None else expected.limit(ranks)
            if limit is not None and not self._told_limit:
                self._told_limit = True
                log.warning("%s: %s; that is only compared between engines of one kind", engine.url, limit)
            if problems := [] if expected is None else expected.problems(ranks):
                more = f" and {len(problems) - QUOTED_PROBLEMS} more" if len(problems) > QUOTED_PROBLEMS else ""
                failures[engine.url] = "; ".join(problems[:QUOTED_PROBLEMS]) + more

        failures.update(await each(engines, ask, slow=True))
        alike = Counter(value for url, value in reported.items() if url not in failures)
        for ranks in {ranks for ranks, _ in alike}:
            (first, count), *others = Counter({v: n for v, n in alike.items() if v[0] == ranks}).most_common()
            if others and others[0][1] == count:
                first = (ranks, "")  # no majority: none of them is to be trusted
            for url, value in reported.items():
                if url not in failures and value[0] == ranks and value != first:
                    failures[url] = f"its {len(ranks)} ranks hold other weights than those of other engines"
        return failures


def _joined(failures: Failures) -> str:
    return "; ".join(f"{url}: {reason}" for url, reason in failures.items())
