"""One turn of the policy from a set of engines: choice, failover, interruptions, and a strict reading of replies.

In: prompt ids and sampling parameters. Out: `Generation`: the ids, logprobs and weight versions of the whole turn. Left
to others: the HTTP client (engine_client.py), prompts, sessions.

An engine may abort a request to change its weights. What it had sampled by then was sampled; the pool asks again with
those ids behind the prompt, and the turn carries a span for each version. An engine looks for stops in its own part
only; the pool looks in the joined text, and the turn ends with the token that completes the first stop.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.prompt_ids import IdText, PromptIds
from rl360.protocols import Engine
from rl360.types import Sampling, VersionSpan

# Ends a turn once a fenced block closes: an opening fence with its language, any lines, three backquotes.
CODE_BLOCK_REGEX = r"```[^\n`]*\n[\s\S]*?```"
FIRST_PAUSE_S = 0.05  # before asking again an engine that aborted without sampling anything
LONGEST_PAUSE_S = 1.0
REFUSED_PAUSE_S = 0.2  # before the one more round that refused connections get
ABORT_TIMEOUT_S = 5.0
SEED_BITS = 31  # SGLang's sampling_seed is a positive int32


@dataclass(frozen=True, slots=True)
class Reply:
    """One checked reply of /generate."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_type: str
    engine_says: Mapping[str, Any]  # everything else in it, untouched


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


@dataclass(slots=True)
class _Load:
    engine: Engine
    open_requests: int = 0
    sessions: set[str] = field(default_factory=set)


def read_reply(reply: Mapping[str, Any], url: str) -> Reply:
    """A reply that the engine client has checked, as a turn's record.

    Raises EngineError: `engine_reply` for a weight version that is no number or a reply without tokens,
    `engine_status_<code>` for a request that the engine refused to run.
    """
    meta = reply["meta_info"]
    rows = meta.get("output_token_logprobs") or []
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and finish.get("status_code"):
        # SGLang reports a request that it will not run (too long, out of memory) as an abort with a status.
        raise EngineError(f"engine_status_{int(finish['status_code'])}", f"{url}: {finish.get('message')}")
    if not rows and finish["type"] != "abort":
        raise EngineError("engine_reply", f"{url}: output_ids is empty, and finish_reason is {finish['type']}")
    says = {key: value for key, value in reply.items() if key not in ("output_ids", "text", "meta_info")}
    says["meta_info"] = {key: value for key, value in meta.items() if key != "output_token_logprobs"}
    ids = [row[1] for row in rows]
    spans = _version_spans(meta, len(ids), url)
    return Reply(ids, [float(row[0]) for row in rows], spans, finish["type"], says)


def sampling_params(sampling: Sampling, max_new_tokens: int, seed: int) -> dict[str, Any]:
    """The engine's sampling parameters; what the agent asked for plays no part."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "sampling_seed": seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_at_code_block:
        params["stop_regex"] = CODE_BLOCK_REGEX
    return params


def mix_seed(*parts: int) -> int:
    """A seed that depends on every part: the attempt's seed, the turn, the part of an interrupted turn."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> (64 - SEED_BITS)


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
    """The serving set. A session stays with its engine (and its prefix cache) unless that one fails or leaves the set.

    While the set is empty (its only engine is being replaced), requests wait for the next one, within their deadline.

    Args:
        engines: all of one model.
        timeout_s: of one turn, with every resumption and failover in it.
        decode: text of ids, special tokens included; None: stops across an interruption are not found.
    """

    def __init__(
        self, engines: Sequence[Engine], timeout_s: float, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        self._loads = [_Load(engine) for engine in engines]
        self._timeout_s = timeout_s
        self._decode = decode
        self._affinity: dict[str, _Load] = {}
        self._texts: dict[str, IdText] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def engines(self) -> list[Engine]:
        return [load.engine for load in self._loads]

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """The serving set from now on. Engines that stay (the same objects) keep their sessions; sessions of one that
        left find another at their next request, and a request that runs on it ends as that engine lets it."""
        kept = {id(load.engine): load for load in self._loads}
        self._loads = [kept.get(id(engine)) or _Load(engine) for engine in engines]
        for session, load in list(self._affinity.items()):
            if load not in self._loads:
                self._leave(session)
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(
        self, session: str, rid: str, prompt_ids: array[int], sampling: Sampling, max_new_tokens: int, seed: int
    ) -> Generation:
        """Sample one turn. Raises EngineError; cancellation aborts the request on its engine."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._generate(session, rid, prompt_ids, sampling, max_new_tokens, seed)
        except TimeoutError as error:
            load = self._affinity.get(session)
            where = load.engine.url if load else "no engine serves: the set is empty"
            raise EngineError("engine_timeout", f"{where}: no answer within {self._timeout_s:g} s") from error

    def forget(self, session: str) -> None:
        """A closed session's engine may take another one."""
        self._texts.pop(session, None)
        self._leave(session)

    def _leave(self, session: str) -> None:
        if load := self._affinity.pop(session, None):
            load.sessions.discard(session)

    async def close(self) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await asyncio.gather(*(load.engine.close() for load in self._loads), return_exceptions=True)

    async def _generate(
        self, session: str, rid: str, prompt_ids: array[int], sampling: Sampling, max_new_tokens: int, seed: int
    ) -> Generation:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        says: list[Mapping[str, Any]] = []
        pause_s = FIRST_PAUSE_S
        text = self._texts.setdefault(session, IdText())
        while True:
            part = len(says)
            params = sampling_params(sampling, max_new_tokens - len(ids), mix_seed(seed, part) if part else seed)
            prompt = text.of(prompt_ids + array(prompt_ids.typecode, ids) if ids else prompt_ids)
            reply, url = await self._ask(session, f"{rid}.{part}", prompt, params)
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
            if finish != "abort":
                cached = says[0]["meta_info"].get("cached_tokens") or 0
                return Generation(ids, logprobs, tuple(spans), finish, int(cached), url, part, tuple(says))
            pause_s = FIRST_PAUSE_S if reply.token_ids else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _stopped_at(self, ids: Sequence[int], sampling: Sampling) -> int | None:
        """How many ids it takes to complete the turn's first stop; None: there is none in it."""
        if self._decode is None or not (sampling.stop or sampling.stop_at_code_block):
            return None
        return await asyncio.to_thread(first_stop, ids, sampling, self._decode)

    async def _ask(self, session: str, rid: str, ids: PromptIds, params: Mapping[str, Any]) -> tuple[Reply, str]:
        """One request, on another engine where one fails; the last failure is raised when all have."""
        failed: list[_Load] = []
        again = False
        while True:
            while not self._loads:
                await self._changed.wait()
            load = self._choose(session, failed)
            load.open_requests += 1
            try:
                raw = await load.engine.generate(ids, params, rid)
                return read_reply(raw, load.engine.url), load.engine.url
            except EngineError as error:
                failed = [one for one in self._loads if one in failed or one is load]  # some may have left
                all_failed = bool(self._loads) and len(failed) == len(self._loads)
                if all_failed and error.cause == "engine_refused" and not again:
                    # Also what a server looks like that closed an idle connection just as this request used it.
                    again = True
                    failed.clear()
                elif error.cause == "engine_timeout" or all_failed:
                    raise
            except asyncio.CancelledError:
                self._abort_soon(load.engine, rid)
                raise
            finally:
                load.open_requests -= 1
            if again and not failed:
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _choose(self, session: str, failed: Sequence[_Load]) -> _Load:
        pinned = self._affinity.get(session)
        if pinned is not None and pinned not in failed:
            return pinned
        free = [load for load in self._loads if load not in failed]
        load = min(free, key=lambda one: (one.open_requests, len(one.sessions)))
        self._leave(session)
        self._affinity[session] = load
        load.sessions.add(session)
        return load

    def _abort_soon(self, engine: Engine, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(_abort(engine, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _abort(engine: Engine, rid: str) -> None:
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await engine.abort(rid)
    except (EngineError, TimeoutError):
        pass  # the engine is gone or will finish the request by itself; nobody waits for it any more


def _version_spans(meta: Mapping[str, Any], num_tokens: int, url: str) -> tuple[VersionSpan, ...]:
    """SGLang from 0.5.20 reports spans; older ones stamp one version on the reply."""
    rows = meta.get("weight_versions") or [{"version": meta["weight_version"], "end": num_tokens}]
    spans = []
    start = 0
    for row in rows:
        try:
            span = VersionSpan(int(str(row["version"])), start, int(str(row["end"])))
        except (TypeError, KeyError, ValueError):
            version = row.get("version") if isinstance(row, Mapping) else row
            problem = f"meta_info.weight_version is {version!r}; expected a number"
            raise EngineError("engine_reply", f"{url}: {problem} (SGLang: --weight-version 0)") from None
        spans.append(span)
        start = span.end
    if start != num_tokens:
        raise EngineError("engine_reply", f"{url}: meta_info.weight_versions covers {start} of {num_tokens} tokens")
    return tuple(span for span in spans if span.end > span.start)
