"""One turn of the policy: its parts, stops across them, and the deadline of the whole.

In: prompt ids and sampling parameters. Out: `Generation`: the ids, logprobs and weight versions of the whole turn. Left
to others: which engine is asked, and again where one fails (routes.py, smg_route.py), prompts, sessions.

An engine may abort a request to change its weights. What it had sampled by then was sampled; the pool asks again with
those ids behind the prompt, and the turn carries a span for each version. An engine looks for stops in its own part
only; the pool looks in the joined text, and the turn ends with the token that completes the first stop. The last token
before an abort can be the policy's end of turn, and SGLang says abort all the same: such a turn is over.

A long turn that a code block ends is asked for up to the next fence, and after one that closes nothing the pool asks
again as after an abort: SGLang looks for a string in the last few tokens, but for the block's expression, which has no
longest match, in the whole answer after every token. The pool finds the fences that an engine has missed, too, but only
when that has ended the part.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.generation import (
    CODE_BLOCK_REGEX,
    FENCE,
    LONGEST_BY_EXPRESSION,
    Reply,
    mix_seed,
    sampling_params,
)
from rl360.gateway.prompt_ids import IdText
from rl360.gateway.routes import Route, Routed
from rl360.protocols import Engine
from rl360.serving.command import KEPT_TOKENS
from rl360.types import Sampling, VersionSpan

FIRST_PAUSE_S = 0.05  # before asking again an engine that aborted without sampling anything
LONGEST_PAUSE_S = 1.0
# Fences that close nothing, after which a turn goes on with the expression: each of them has cost a request.
MOST_FENCES = 16


@dataclass(frozen=True, slots=True)
class Generation:
    """One whole turn."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_type: str  # stop | length
    cached_tokens: int
    engine_url: str
    interruptions: int  # by engines; going on after a fence is none
    engine_says: tuple[Mapping[str, Any], ...]  # of each reply, also of those up to a fence
    resends: int = 0  # requests that failed under us and were sent again


@dataclass(slots=True)
class _Sampled:
    """What the parts of a turn have given so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)  # neighbours differ in version
    says: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, reply: Reply) -> None:
        offset = len(self.ids)
        for span in reply.version_spans:
            start = offset + span.start
            if self.spans and self.spans[-1].version == span.version:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(span.version, start, offset + span.end))
        self.ids += reply.token_ids
        self.logprobs += reply.logprobs
        self.says.append(reply.engine_says)

    def cut(self, end: int) -> None:
        """Keep the first `end` tokens."""
        del self.ids[end:], self.logprobs[end:]
        self.spans = [VersionSpan(s.version, s.start, min(s.end, end)) for s in self.spans if s.start < end]

    def whole(self, finish_type: str, engine_url: str, interruptions: int, resends: int) -> Generation:
        return Generation(
            token_ids=self.ids,
            logprobs=self.logprobs,
            version_spans=tuple(self.spans),
            finish_type=finish_type,
            cached_tokens=int(self.says[0]["meta_info"].get("cached_tokens") or 0),
            engine_url=engine_url,
            interruptions=interruptions,
            engine_says=tuple(self.says),
            resends=resends,
        )


def first_stop(ids: Sequence[int], sampling: Sampling, decode: Callable[[Sequence[int]], str]) -> int | None:
    """The length of the shortest prefix of the ids whose text holds a stop; None: the whole text holds none."""
    pattern = re.compile(CODE_BLOCK_REGEX) if sampling.stop_at_code_block else None

    def stopped(length: int) -> bool:
        text = decode(ids[:length])
        return any(stop in text for stop in sampling.stop) or bool(pattern and pattern.search(text))

    if not stopped(len(ids)):
        return None
    if not stopped(len(ids) - 1):  # as a rule: an engine ended it there
        return len(ids)
    low, high = 0, len(ids) - 1  # a text that holds a stop still does when it grows
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
        split_above: turns of more tokens that a code block ends are asked for fence by fence; None: no turn is. That is
            for requests that are drained before new weights: between two fences a turn would meet them.
    """

    def __init__(
        self,
        route: Route,
        timeout_s: float,
        decode: Callable[[Sequence[int]], str] | None = None,
        eos_ids: Collection[int] = (),
        split_above: int | None = LONGEST_BY_EXPRESSION,
    ) -> None:
        self.route = route
        self._timeout_s = timeout_s
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._split_above = split_above if decode is not None else None
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

        The clocks of all turns stand still meanwhile: a hold may last a whole training step. A turn that goes on after
        a fence waits as well.
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
        turn = _Sampled()
        pause_s = FIRST_PAUSE_S
        resends = fences = 0
        routed: Routed | None = None
        # Of the whole turn: in a later part, the expression would not see where a block began.
        above = self._split_above
        long = sampling.stop_at_code_block and above is not None and max_new_tokens > above
        text = self._texts.setdefault(session, IdText())
        while True:
            part = len(turn.says)
            to_fence = long and fences < MOST_FENCES
            # Engines draw by seed and place: behind a fence the turn's own seed draws what one request would have.
            part_seed = mix_seed(seed, part - fences) if part > fences else seed
            left = max_new_tokens - len(turn.ids)
            params = sampling_params(sampling, left, part_seed, to_fence)
            prompt = text.of(prompt_ids + array(prompt_ids.typecode, turn.ids) if turn.ids else prompt_ids)
            try:
                routed = await self.route.ask(session, f"{rid}.{part}", prompt, params)
            except EngineError as error:
                if routed is None or not turn.ids or left > KEPT_TOKENS or error.cause != "engine_status_400":
                    raise
                # The prompt ends in those tokens of its context that an engine keeps: the turn is as long as it can be.
                return turn.whole("length", routed.engine_url, part - fences, resends)
            reply = routed.reply
            resends += routed.resends
            turn.add(reply)
            finish = reply.finish_type
            end = await self._stopped_at(turn.ids, sampling) if reply.token_ids and (part or to_fence) else None
            if end is not None:
                if end < len(turn.ids) or finish == "abort":
                    finish = "stop"
                turn.cut(end)
            elif to_fence and finish == "stop" and await self._ended_at_fence(reply):
                finish = "fence"
            if finish in ("abort", "fence") and len(turn.ids) >= max_new_tokens:
                finish = "length"
            if finish == "abort" and turn.ids and turn.ids[-1] in self._eos_ids:
                finish = "stop"
            if finish not in ("abort", "fence"):
                return turn.whole(finish, routed.engine_url, part - fences, resends)
            pause_s = FIRST_PAUSE_S if reply.token_ids else min(2 * pause_s, LONGEST_PAUSE_S)
            if finish == "fence":
                fences += 1
            else:
                await asyncio.sleep(pause_s)

    async def _stopped_at(self, ids: Sequence[int], sampling: Sampling) -> int | None:
        """How many ids it takes to complete the turn's first stop; None: there is none in it."""
        if self._decode is None or not (sampling.stop or sampling.stop_at_code_block):
            return None
        return await asyncio.to_thread(first_stop, ids, sampling, self._decode)

    async def _ended_at_fence(self, reply: Reply) -> bool:
        """Whether a part that was asked for up to the next fence, and stopped, did so there: not at an end of turn."""
        assert self._decode is not None
        if reply.ended_by_token or reply.token_ids[-1] in self._eos_ids:
            return False
        return FENCE in await asyncio.to_thread(self._decode, reply.token_ids)


def _move(limit: asyncio.Timeout, when: float | None) -> None:
    """One that has run out just now, and whose turn is on its way out, stays as it is."""
    if not limit.expired():
        limit.reschedule(when)
