"""Which engine a request goes to when the proxy chooses itself: the least loaded one, and then always the same.

In: a session's requests. Out: `Routed`: the reply, the engine that gave it, and how often it had to be sent again.
Left to others: HTTP (engine_client.py), whole turns (engine_pool.py), the way through SMG (smg_route.py).

An engine that refuses connections or answers 5xx is left out: its sessions' next turns go elsewhere, and new sessions
do not come. It is asked again once it answers and serves the newest weights that this route has seen: one that came
back by itself may have those that it was started with.

While the serving set is empty (its engines are being replaced), requests wait for the next one, and their clocks stand
still (engine_pool.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl360.errors import EngineError
from rl360.gateway.gate import Gate
from rl360.gateway.generation import Reply, read_reply
from rl360.gateway.prompt_ids import PromptIds
from rl360.protocols import Engine

log = logging.getLogger(__name__)

REFUSED_PAUSE_S = 0.2  # before the one more round that refused connections get
FIRST_LOOK_S = 0.5  # until an engine that was left out is looked at; then twice as long each time
LONGEST_LOOK_S = 10.0
ABORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Routed:
    """One answered request. `resends`: how often it failed under us and was sent again before."""

    reply: Reply
    engine_url: str
    resends: int = 0


class Route(Protocol):
    """The way from a session to an engine. No request is sent, or sent again, while `gate` is closed."""

    gate: Gate

    async def ask(self, session: str, rid: str, ids: PromptIds, params: Mapping[str, Any]) -> Routed:
        """One request. Raises EngineError; cancellation aborts it on its engine."""
        ...

    def where(self, session: str) -> str: ...  # for messages: whom the session waits for
    def forget(self, session: str) -> None: ...  # it is closed
    def set_engines(self, engines: Sequence[Engine]) -> None: ...  # the serving set from now on
    def counts(self) -> Mapping[str, int]: ...
    async def close(self) -> None: ...


def resend_rid(rid: str, resends: int) -> str:
    """An engine may still have the request that it seemed to have lost, and refuses the same id twice."""
    return f"{rid}.r{resends}" if resends else rid


@dataclass(slots=True, eq=False)
class _Load:
    engine: Engine
    open_requests: int = 0
    sessions: set[str] = field(default_factory=set)
    left_out: asyncio.Task[None] | None = None  # watches for its return


class LeastLoaded:
    """Implements Route. A new session goes to the engine with the fewest open requests, then the fewest sessions."""

    def __init__(self, engines: Sequence[Engine], first_look_s: float = FIRST_LOOK_S) -> None:
        self.gate = Gate()
        self._loads = [_Load(engine) for engine in engines]
        self._first_look_s = first_look_s
        self._changed = asyncio.Event()  # the serving set
        self._affinity: dict[str, _Load] = {}
        self._last_engine: dict[str, str] = {}  # of each open session
        self._newest_version = 0
        self._background: set[asyncio.Task[None]] = set()
        self._resends = self._moves = self._times_left_out = 0

    async def ask(self, session: str, rid: str, ids: PromptIds, params: Mapping[str, Any]) -> Routed:
        """One request, on another engine where one fails; the last failure is raised when all have."""
        failed: list[_Load] = []
        again = False
        resends = 0
        while True:
            await self.gate.until_open()
            while not self._loads:
                await self._changed.wait()
                await self.gate.until_open()
            load = self._choose(session, failed)
            load.open_requests += 1
            try:
                with self.gate.passing():
                    raw = await load.engine.generate(ids, params, resend_rid(rid, resends))
                reply = read_reply(raw, load.engine.url)
                self._newest_version = max(self._newest_version, *(span.version for span in reply.version_spans), 0)
                return Routed(reply, load.engine.url, resends)
            except EngineError as error:
                if error.cause == "engine_timeout" or refuses_request(error.cause):
                    raise
                if error.cause == "engine_refused" or error.cause.startswith("engine_status_5"):
                    self._leave_out(load, error)
                failed = [one for one in self._loads if one in failed or one is load]  # some may have left
                if self._loads and len(failed) == len(self._loads):
                    if error.cause not in ("engine_refused", "host_io") or again:
                        raise
                    # Also what a server looks like that closed an idle connection just as this request used it.
                    again = True
                    failed.clear()
            except asyncio.CancelledError:
                self._in_background(abort_quietly(load.engine, resend_rid(rid, resends)))
                raise
            finally:
                load.open_requests -= 1
            resends += 1
            self._resends += 1
            if again and not failed:
                await asyncio.sleep(REFUSED_PAUSE_S)

    def where(self, session: str) -> str:
        load = self._affinity.get(session)
        return load.engine.url if load else "no engine serves: the set is empty"

    def forget(self, session: str) -> None:
        self._last_engine.pop(session, None)
        self._leave(session)

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """The serving set from now on. Engines that stay (the same objects) keep their sessions; sessions of one that
        left find another at their next request, and a request that runs on it ends as that engine lets it."""
        before = {id(load.engine): load for load in self._loads}
        self._loads = [(before.pop(id(engine)) if id(engine) in before else _Load(engine)) for engine in engines]
        for load in before.values():
            if load.left_out is not None:
                load.left_out.cancel()
        for session, load in list(self._affinity.items()):
            if load not in self._loads:
                self._leave(session)
        self._changed.set()
        self._changed = asyncio.Event()

    def counts(self) -> Mapping[str, int]:
        return {
            "engine_resends": self._resends,
            "engine_moves": self._moves,
            "engines_left_out_now": sum(load.left_out is not None for load in self._loads),
            "engines_left_out": self._times_left_out,
        }

    async def close(self) -> None:
        for load in self._loads:
            if load.left_out is not None:
                load.left_out.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _choose(self, session: str, failed: Sequence[_Load]) -> _Load:
        untried = [load for load in self._loads if load not in failed]
        free = [load for load in untried if load.left_out is None] or untried
        pinned = self._affinity.get(session)
        if pinned is not None and pinned in free:
            return pinned
        load = min(free, key=lambda one: (one.open_requests, len(one.sessions)))
        self._leave(session)
        self._affinity[session] = load
        load.sessions.add(session)
        self._moves += self._last_engine.get(session, load.engine.url) != load.engine.url
        self._last_engine[session] = load.engine.url
        return load

    def _leave(self, session: str) -> None:
        if load := self._affinity.pop(session, None):
            load.sessions.discard(session)

    def _leave_out(self, load: _Load, error: EngineError) -> None:
        if load.left_out is None and len(self._loads) > 1 and load in self._loads:
            log.warning("engine %s is left out: %s", load.engine.url, error)
            self._times_left_out += 1
            load.left_out = self._in_background(self._until_it_serves(load))

    async def _until_it_serves(self, load: _Load) -> None:
        pause_s = self._first_look_s
        while True:
            await asyncio.sleep(pause_s)
            if await may_serve(load.engine, self._newest_version):
                break
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        load.left_out = None
        log.warning("engine %s is asked again", load.engine.url)

    def _in_background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def refuses_request(cause: str) -> bool:
    """Whether the engine refuses the request as it stands; another one would too."""
    return cause.startswith("engine_status_4") and cause not in ("engine_status_408", "engine_status_429")


async def may_serve(engine: Engine, newest_version: int) -> bool:
    """Whether an engine that had failed answers and has weights that are not older than the others'."""
    try:
        return int(str((await engine.info())["weight_version"])) >= newest_version
    except (EngineError, KeyError, ValueError):
        return False


async def abort_quietly(engine: Engine, rid: str) -> None:
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await engine.abort(rid)
    except (EngineError, TimeoutError):
        pass  # the engine is gone, or will finish the request by itself
