"""One session: the calls of one agent, its caps, its retries and its failures.

In: request bodies, concurrently. Out: answers, and at the end a `Session` record. Left to others: HTTP (proxy.py),
token bookkeeping (tokens.py), engines (engine_pool.py).

A call runs in a task of its own, so that a client that hangs up and asks again finds it. All heavy work (JSON,
templates, tokenization) happens in the executor; what is left on the event loop is dictionary work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.engine_pool import Generation
from rl360.gateway.generation import mix_seed
from rl360.gateway.openai_api import (
    ChatRequest,
    ReplyOptions,
    RequestError,
    SampledToken,
    completion,
    context_length_error,
    parse_request,
    with_options,
)
from rl360.gateway.replies import Services, assistant_message, engine_extra
from rl360.gateway.templates import Boundary, ChatTemplate, Rendering, TemplateRefused
from rl360.gateway.tokens import Plan, Sampled, TokenHistory
from rl360.types import AttemptSpec, Session, Stop, Turn

log = logging.getLogger(__name__)

STATUS_BY_CAUSE = {"engine_refused": 503, "engine_timeout": 504}  # any other engine failure is a 502
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished model call: what every retry of it is told."""

    payload: dict[str, Any]
    num_prompt_ids: int
    token_ids: list[int]
    logprobs: list[float]
    segment: int


@dataclass(slots=True, eq=False)
class Call:
    """One distinct request, without its (long) messages. `delivered`: some client has read the whole answer."""

    key: bytes
    task: asyncio.Task[Answer]
    began: float  # by the session's clock
    ended: float = float("inf")
    clients: int = 0
    delivered: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def abandoned(self) -> bool:
        """Nobody has read the answer and nobody waits for it."""
        return not self.delivered and not self.clients

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Hold this while a client waits for the answer and reads it."""
        self.clients += 1
        try:
            yield
        finally:
            self.clients -= 1


class _SessionRenderer:
    """The shared template with this session's clock: a date in the prompt must not change at midnight."""

    def __init__(self, template: ChatTemplate, now: datetime) -> None:
        self._template = template
        self._now = now

    def start(self, messages: Messages, tools: Messages, arguments: Mapping[str, Any]) -> Rendering:
        return self._template.start(messages, tools, arguments, self._now)

    def extend(
        self,
        messages: Messages,
        sampled: Sequence[int],
        boundaries: Sequence[Boundary],
        last_id: int,
        tools: Messages,
        arguments: Mapping[str, Any],
    ) -> Rendering:
        return self._template.extend(messages, sampled, boundaries, last_id, tools, arguments, self._now)


class ProxySession:
    """State of one open session.

    Args:
        spec: its sampling overrides the agent's.
        services: shared by all sessions.
        clock: monotonic seconds, for engine_wait_s.
    """

    def __init__(
        self,
        spec: AttemptSpec,
        services: Services,
        now: datetime | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._services = services
        self._clock = clock
        self._tokens = TokenHistory(_SessionRenderer(services.template, now or datetime.now()))
        self._planning = asyncio.Lock()
        self._calls: dict[bytes, Call] = {}
        self._numbers: dict[bytes, int] = {}
        self._turns: list[tuple[Turn, Call]] = []
        self._retries = 0
        self._resends = 0
        self._moves = 0
        self._engine_url: str | None = None  # that gave the last turn
        self._stop: Stop | None = None
        self._failure: tuple[int, str] | None = None  # (clock tick, cause) of the last call that failed
        self._tick = 0
        self._closed = False
        self._last: ChatRequest | None = None  # the next one repeats most of it
        self._waiting = 0
        self._waiting_since = 0.0
        self._waited_s = 0.0
        self._sampling_s = 0.0

    async def read(self, body: bytes) -> tuple[ChatRequest, ReplyOptions]:
        """Parse a request off the event loop. Raises RequestError."""
        request, options = await self._offload(parse_request, body, self._last)
        self._last = request
        return request, options

    def call(self, request: ChatRequest) -> Call:
        """The call that answers a request: a running or finished one for a retry, else a new one.

        Raises RequestError when the session is over or at a cap.
        """
        if self._closed:
            raise RequestError(404, f"session {self.spec.try_id} is closed", code="session_not_found")
        known = self._calls.get(request.key)
        if known is not None and not known.failed:
            self._retries += 1
            return known
        given_up = self._give_up_abandoned()
        self._check_caps()
        number = self._numbers.setdefault(request.key, len(self._numbers))
        task = asyncio.get_running_loop().create_task(self._run(request, number, given_up))
        task.add_done_callback(_retrieve)
        call = Call(request.key, task, self._clock())
        self._calls[request.key] = call
        return call

    async def answer(self, call: Call, options: ReplyOptions) -> dict[str, Any]:
        """Wait for a call. Raises RequestError; being cancelled (a client that hangs up) leaves the call running."""
        try:
            with self.waiting():
                answer = await asyncio.shield(call.task)
            if not (options.logprobs or options.token_ids):
                return answer.payload
            return await self._offload(self._with_options, answer, options)
        except asyncio.CancelledError:
            if call.task.cancelled():  # the session was closed under a waiting client
                raise RequestError(404, "the session was closed", code="session_not_found") from None
            raise

    async def close(self) -> Session:
        """End every call and hand over the record. No call is accepted afterwards."""
        self._closed = True
        unanswered = self._unanswered()
        open_tasks = [call.task for call in self._calls.values() if not call.task.done()]
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        self._services.pool.forget(self.spec.try_id)
        self._drop_undelivered()
        return replace(await self._offload(self._record), unanswered=unanswered)

    # -- one call ----------------------------------------------------------------------------------------------------

    async def _run(self, request: ChatRequest, number: int, given_up: Sequence[asyncio.Task[Answer]]) -> Answer:
        self._tick += 1
        started = self._tick
        began = self._clock()
        try:
            await asyncio.gather(*given_up, return_exceptions=True)  # they hold the segment until they are gone
            answer, turn, plan = await self._turn(request, number, began)
        except EngineError as error:
            self._fail(error.cause)
            log.warning("%s turn %d: %s", self.spec.try_id, number, error)
            status = STATUS_BY_CAUSE.get(error.cause, 502)
            raise RequestError(status, str(error), code=error.cause) from error
        except TemplateRefused as error:
            raise RequestError(400, str(error), code="template_refused", param="messages") from error
        except (RequestError, asyncio.CancelledError):
            raise
        except Exception as error:  # a bug of ours must not look like the policy's failure, nor take the proxy down
            self._fail("proxy_error")
            log.exception("%s turn %d: the proxy failed", self.spec.try_id, number)
            raise RequestError(500, f"proxy_error: {error!r}", code="proxy_error") from error
        if self._failure is not None and self._failure[0] < started:
            self._failure = None  # it recovered: this call began after the failure and was answered
        call = self._calls[request.key]
        call.ended = self._clock()
        self._turns.append((turn, call))
        if plan.fork_reason:
            log.info("%s turn %d: segment %d began: %s", self.spec.try_id, number, turn.segment, plan.fork_reason)
        return answer

    async def _turn(self, request: ChatRequest, number: int, began: float) -> tuple[Answer, Turn, Plan]:
        sampling = self.spec.sampling
        async with self._planning:
            self._drop_undelivered()
            plan = self._tokens.reserve(await self._offload(self._tokens.plan, request))
        committed = False
        try:
            room = sampling.max_context_tokens - len(plan.prompt_ids)
            if room <= 0:
                self._stop = Stop.LENGTH
                raise context_length_error(
                    f"{len(plan.prompt_ids)} tokens in the messages, {sampling.max_context_tokens} in all"
                )
            asked = self._clock()
            generation = await self._services.pool.generate(
                self.spec.try_id,
                f"{self.spec.try_id}.{number}",
                plan.prompt_ids,
                sampling,
                min(sampling.max_new_tokens, room),
                mix_seed(self.spec.seed, number),
            )
            self._count(generation, self._clock() - asked)
            message, known = await self._offload(
                assistant_message, self._services, request, plan, generation, (self.spec.seed, number)
            )
            sampled = Sampled(generation.token_ids, generation.logprobs, generation.version_spans)
            async with self._planning:
                segment = self._tokens.commit(plan, sampled, known)
                committed = True
        finally:
            if not committed:
                self._tokens.release(plan)
        finish = (
            "tool_calls" if message.get("tool_calls") and generation.finish_type == "stop" else generation.finish_type
        )
        payload = completion(
            completion_id=f"chatcmpl-{self.spec.try_id}-{number}",
            model=request.model,
            message=message,
            finish_reason=finish,
            prompt_tokens=len(plan.prompt_ids),
            completion_tokens=len(generation.token_ids),
            cached_tokens=generation.cached_tokens,
            extra={"turn": number, "segment": segment, "fork_reason": plan.fork_reason, **engine_extra(generation)},
        )
        turn = Turn(
            request_messages=tuple(request.messages[plan.first_new_message :]),
            response_message=message,
            finish_reason=finish,
            prompt_tokens=len(plan.prompt_ids),
            completion_tokens=len(generation.token_ids),
            engine_wait_s=self._clock() - began,
            segment=segment,
        )
        answer = Answer(payload, len(plan.prompt_ids), generation.token_ids, generation.logprobs, segment)
        return answer, turn, plan

    def _with_options(self, answer: Answer, options: ReplyOptions) -> dict[str, Any]:
        decode = self._services.tokenizer.decode
        tokens = []
        if options.logprobs:
            tokens = [SampledToken(decode([i]), p) for i, p in zip(answer.token_ids, answer.logprobs, strict=True)]
        prompt_ids = self._tokens.prefix(answer.segment, answer.num_prompt_ids) if options.token_ids else []
        return with_options(answer.payload, options, tokens, prompt_ids, answer.token_ids)

    # -- caps, failures, waiting -------------------------------------------------------------------------------------

    def _check_caps(self) -> None:
        sampling = self.spec.sampling
        if self._stop is None:
            num_open = sum(not call.task.done() for call in self._calls.values())
            num_turns = sum(not call.abandoned for _, call in self._turns)
            if self._num_truncated() >= self._services.max_truncated_turns:
                self._stop = Stop.LENGTH
            elif num_turns + num_open >= sampling.max_turns:
                self._stop = Stop.TURNS
        if self._stop is Stop.TURNS:
            raise context_length_error(f"the session's {sampling.max_turns} turns are used up")
        if self._stop is Stop.LENGTH:
            raise context_length_error("the session reached its token cap")

    def _count(self, generation: Generation, seconds: float) -> None:
        num_tokens = len(generation.token_ids)
        self._services.pace.add(num_tokens, seconds)
        self._sampling_s += self._services.pace.sampling_s(num_tokens, seconds)
        self._resends += generation.resends
        self._moves += self._engine_url not in (None, generation.engine_url)
        self._engine_url = generation.engine_url

    def _fail(self, cause: str) -> None:
        self._tick += 1
        self._failure = (self._tick, cause)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Hold this while a client waits. `engine_wait_s` is the time in which at least one does, not their sum.

        A call that goes on after its client hung up is nobody's wait: an agent that timed out is being graded by then.
        """
        if not self._waiting:
            self._waiting_since = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._waited_s += self._clock() - self._waiting_since

    # -- answers that nobody read ------------------------------------------------------------------------------------

    def _give_up_abandoned(self) -> list[asyncio.Task[Answer]]:
        """A client hung up and now asks something else: what it never read is not part of its history."""
        given_up = []
        for call in [call for call in self._calls.values() if call.abandoned]:
            if not call.task.done():
                call.task.cancel()
                given_up.append(call.task)
            del self._calls[call.key]
        return given_up

    def _drop_undelivered(self) -> None:
        if not any(call.abandoned for _, call in self._turns):
            return
        kept: list[tuple[Turn, Call]] = []
        for turn, call in reversed(self._turns):
            built_upon = any(later.segment == turn.segment for later, _ in kept)
            if not (call.abandoned and not built_upon and self._tokens.drop_last_turn(turn.segment)):
                kept.append((turn, call))
        self._turns = kept[::-1]

    def _unanswered(self) -> bool:
        """Whether a client waited for the engine, in vain, after the last answer that it read.

        A call that another one overtook tells nothing: an agent with several of them may end on what the first says.
        """
        answered_until = max((call.ended for call in self._calls.values() if call.delivered), default=float("-inf"))
        return any(
            not call.delivered and not call.failed and call.began >= answered_until for call in self._calls.values()
        )

    def _num_truncated(self) -> int:
        return sum(turn.finish_reason == "length" for turn, call in self._turns if not call.abandoned)

    def _record(self) -> Session:
        segments, place = self._tokens.segments()
        turns = tuple(replace(turn, segment=place[turn.segment]) for turn, _ in self._turns)
        stop = self._stop
        if stop is None and turns and turns[-1].finish_reason == "length":
            stop = Stop.LENGTH
        cause = None
        if self._failure is not None:
            stop, cause = Stop.INFRASTRUCTURE, self._failure[1]
        counts = (self._num_truncated(), self._retries, self._resends, self._moves)
        return Session(segments, turns, stop, cause, self._waited_s, *counts, min(self._sampling_s, self._waited_s))

    async def _offload(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._services.executor, function, *args)


def _retrieve(task: asyncio.Task[Answer]) -> None:
    """A failure that no client waits for any more was already recorded and logged."""
    if not task.cancelled():
        task.exception()
