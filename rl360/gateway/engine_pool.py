"""One turn of the policy: interruptions, stops across them, and the deadline of the whole.

In: prompt ids and sampling parameters. Out: `Generation`: the ids, logprobs and weight versions of the whole turn. Left
to others: which engine is asked, and again where one fails (routes.py, smg_route.py), prompts, sessions.

An engine may abort a request to change its weights. What it had sampled by then was sampled; the pool asks again with
those ids behind the prompt, and the turn carries a span for each version. An engine looks for stops in its own part
only; the pool looks in the joined text, and the turn ends with the token that completes the first stop. The last token
before an abort can be the policy's end of turn, and SGLang says abort all the same: such a turn is over.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.generation import CODE_BLOCK_REGEX, mix_seed, sampling_params
from rl360.gateway.prompt_ids import IdText
from rl360.gateway.routes import Route
from rl360.protocols import Engine
from rl360.types import Sampling, VersionSpan

FIRST_PAUSE_S = 0.05  # before asking again an engine that aborted without sampling anything
LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One whole turn."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_type: str  # stop | length
    cached_tokens: int
    engine_url: str
    interruptions: int
    engine_says: tuple[Mapping[str, Any], ...]  # of each reply
    resends: int = 0  # requests that failed under us and were sent again


def first_stop(ids: Sequence[int], sampling: Sampling, decode: Callable[[Sequence[int]], str]) -> int | None:
    """The length of the shortest prefix of the ids whose text holds a stop; None: the whole text holds none."""
    pattern = re.compile(CODE_BLOCK_REGEX) if sampling.stop_at_code_block else None

    def stopped(length: int) -> bool:
        text = decode(ids[:length])
        return any(stop in text for stop in sampling.stop) or bool(pattern and pattern.search(text))

    if not stopped(len(ids)):
        return None
    low, high = 0, len(ids)  # a text that holds a stop still does when it grows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return high


class EnginePool:
    """Turns, over whatever way requests take to the engines.

    Args:
        route: the way; closed with the pool.
        timeout_s: of one turn, with every resumption and failover in it.
        decode: text of ids, special tokens included; None: stops across an interruption are not found.
        eos_ids: ids that end a turn.
    """

    def __init__(
        self,
        route: Route,
        timeout_s: float,
        decode: Callable[[Sequence[int]], str] | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.route = route
        self._timeout_s = timeout_s
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._texts: dict[str, IdText] = {}
        self._limits: dict[asyncio.Timeout, float] = {}  # of each open turn: seconds left when its clock was stopped
        self._held = self._empty = False

    async def generate(
        self, session: str, rid: str, prompt_ids: array[int], sampling: Sampling, max_new_tokens: int, seed: int
    ) -> Generation:
        """Sample one turn. Raises EngineError; cancellation aborts the request on its engine."""
        try:
            async with asyncio.timeout(None if self._clocks_stand else self._timeout_s) as limit:
                self._limits[limit] = self._timeout_s
                try:
                    return await self._generate(session, rid, prompt_ids, sampling, max_new_tokens, seed)
                finally:
                    del self._limits[limit]
        except TimeoutError as error:
            where = self.route.where(session)
            raise EngineError("engine_timeout", f"{where}: no answer within {self._timeout_s:g} s") from error

    def hold(self) -> None:
        """No request reaches an engine until `release`; what runs goes on, or is aborted by whoever asked for this.

        The clocks of all turns stand still meanwhile: a hold may last a whole training step.
        """
        self.route.gate.close()
        self._set_clocks(held=True)

    def release(self) -> None:
        self.route.gate.open()
        self._set_clocks(held=False)

    @property
    def _clocks_stand(self) -> bool:
        return self._held or self._empty

    def _set_clocks(self, held: bool | None = None, empty: bool | None = None) -> None:
        stood = self._clocks_stand
        self._held = self._held if held is None else held
        self._empty = self._empty if empty is None else empty
        if self._clocks_stand == stood:
            return
        now = asyncio.get_running_loop().time()
        for limit, left_s in self._limits.items():
            if stood:
                _move(limit, now + left_s)
            else:
                when = limit.when()
                self._limits[limit] = self._timeout_s if when is None else max(0.0, when - now)
                _move(limit, None)

    async def idle(self, timeout_s: float) -> int:
        """Wait until no request is on an engine; returns how many still are after `timeout_s`."""
        return await self.route.gate.until_empty(timeout_s)

    def forget(self, session: str) -> None:
        """A closed session's engine may take another one."""
        self._texts.pop(session, None)
        self.route.forget(session)

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """The serving set from now on. While it is empty, all engines are being replaced, and the clocks of turns stand
        still: how long a server takes to start has nothing to do with a turn."""
        self.route.set_engines(engines)
        self._set_clocks(empty=not engines)

    async def close(self) -> None:
        await self.route.close()

    async def _generate(
        self, session: str, rid: str, prompt_ids: array[int], sampling: Sampling, max_new_tokens: int, seed: int
    ) -> Generation:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        says: list[Mapping[str, Any]] = []
        pause_s = FIRST_PAUSE_S
        resends = 0
        text = self._texts.setdefault(session, IdText())
        while True:
            part = len(says)
            params = sampling_params(sampling, max_new_tokens - len(ids), mix_seed(seed, part) if part else seed)
            prompt = text.of(prompt_ids + array(prompt_ids.typecode, ids) if ids else prompt_ids)
            routed = await self.route.ask(session, f"{rid}.{part}", prompt, params)
            reply = routed.reply
            resends += routed.resends
            spans += [VersionSpan(s.version, len(ids) + s.start, len(ids) + s.end) for s in reply.version_spans]
            ids += reply.token_ids
            logprobs += reply.logprobs
            says.append(reply.engine_says)
            finish = reply.finish_type
            if part and reply.token_ids and (end := await self._stopped_at(ids, sampling)) is not None:
                if end < len(ids) or finish == "abort":
                    finish = "stop"
                ids, logprobs = ids[:end], logprobs[:end]
                spans = [VersionSpan(s.version, s.start, min(s.end, end)) for s in spans if s.start < end]
            if finish == "abort" and len(ids) >= max_new_tokens:
                finish = "length"
            if finish == "abort" and ids and ids[-1] in self._eos_ids:
                finish = "stop"
            if finish != "abort":
                cached = says[0]["meta_info"].get("cached_tokens") or 0
                return Generation(
                    ids, logprobs, tuple(spans), finish, int(cached), routed.engine_url, part, tuple(says), resends
                )
            pause_s = FIRST_PAUSE_S if reply.token_ids else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _stopped_at(self, ids: Sequence[int], sampling: Sampling) -> int | None:
        """How many ids it takes to complete the turn's first stop; None: there is none in it."""
        if self._decode is None or not (sampling.stop or sampling.stop_at_code_block):
            return None
        return await asyncio.to_thread(first_stop, ids, sampling, self._decode)


def _move(limit: asyncio.Timeout, when: float | None) -> None:
    """One that has run out just now, and whose turn is on its way out, stays as it is."""
    if not limit.expired():
        limit.reschedule(when)
