"""Token truth of one session: which tokens the policy sampled, and in which sequence it saw them.

In: requests (comparable messages), then the ids, logprobs and weight versions that the engine sampled for them. Out:
the next prompt's ids, and at the end `Segment`s. Left to others: HTTP, the engine, caps, parsing. No I/O and no clock
here.

The rules. Text that was sampled is never rendered again: the next prompt is the ids so far plus the rendering of what
is new. Whether a request continues a history is decided on the messages that were returned, not on text. A request
that does not continue one starts a new segment, with a reason; the longest history that it shares is carried over as
ids with mask 0. So each sampled token has mask 1 in exactly one segment, the one that it was sampled in.

`plan` only reads and may run in a worker thread; `reserve`, `release` and `commit` change the session and must not run
beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from rl360.gateway.messages import CanonicalMessage
from rl360.gateway.templates import Boundary, CannotExtend, Rendering
from rl360.types import Segment, VersionSpan

IDS = "i"  # array type codes: int32 ids and float32 logprobs, a tenth of what lists would take
LOGPROBS = "f"


class ForkReason(StrEnum):
    """Why a segment began. The template's own reasons (templates.CannotExtend) stand beside these."""

    NEW_CONVERSATION = "new_conversation"  # has no turn of the policy yet
    HISTORY_EDITED = "history_edited"  # an earlier message was changed, dropped or inserted
    CONTEXT_CHANGED = "context_changed"  # other tools or template arguments
    CONCURRENT_REQUEST = "concurrent_request"  # the history is being continued by another request just now


class Renderer(Protocol):
    """What templates.ChatTemplate does, with the session's clock filled in."""

    def start(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> Rendering: ...

    def extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampled: Sequence[int],
        boundaries: Sequence[Boundary],
        last_id: int,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> Rendering: ...


class Request(Protocol):
    """The part of a chat request that decides tokens (openai_api.ChatRequest)."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def history(self) -> Sequence[CanonicalMessage]: ...
    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def template_arguments(self) -> Mapping[str, Any]: ...
    @property
    def context_digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """One turn as the engine sampled it. Version spans count from the turn's first token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version_spans: tuple[VersionSpan, ...]

    def __post_init__(self) -> None:
        covered = sum(span.end - span.start for span in self.version_spans)
        if not len(self.token_ids) == len(self.logprobs) == covered:
            raise ValueError(f"{len(self.token_ids)} ids, {len(self.logprobs)} logprobs, {covered} with a version")


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request becomes a prompt. `parent`: the segment that it continues or carries over."""

    prompt_ids: array[int]
    parent: int | None
    turns: int  # how many of the parent's sampled turns stand in this prompt
    fork_reason: str | None  # None: appended to the parent, or the session's first segment
    starts_segment: bool
    num_new_ids: int  # ids at the end of the prompt that were rendered for this request
    first_new_message: int
    boundary: Boundary
    generation_prompt: str
    history: tuple[CanonicalMessage, ...]
    context_digest: bytes


@dataclass(slots=True)
class _Turn:
    """Where a segment stood after one sampled turn."""

    num_messages: int
    num_tokens: int
    start: int  # first token of the turn itself
    sampled_here: bool  # False: carried over from the parent


@dataclass(slots=True)
class _Segment:
    parent: int | None
    fork_reason: str | None
    context_digest: bytes
    token_ids: array[int] = field(default_factory=lambda: array(IDS))
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROBS))  # of the turns sampled here, in order
    version_spans: list[VersionSpan] = field(default_factory=list)
    history: list[CanonicalMessage] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)  # one for each turn
    turns: list[_Turn] = field(default_factory=list)
    busy: bool = False

    def sampled_messages(self, num_turns: int) -> list[int]:
        return [turn.num_messages - 1 for turn in self.turns[:num_turns]]

    def turns_shared_with(self, history: Sequence[CanonicalMessage]) -> int:
        """Number of this segment's turns that a request's history contains, from the start and unchanged."""
        sampled = set(self.sampled_messages(len(self.turns)))
        same = 0
        for sent, known in zip(history, self.history, strict=False):
            if not sent.continues(known, same in sampled):
                break
            same += 1
        return sum(turn.num_messages <= same for turn in self.turns)


class TokenHistory:
    """The segments of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._segments: list[_Segment] = []

    def plan(self, request: Request) -> Plan:
        """The prompt of a request. Raises templates.TemplateRefused when the template rejects the conversation."""
        parent, turns, same_context = self._longest_shared(request)
        if parent is None:
            return self._plan_start(request, self._reason_to_start(request, same_context), None)
        segment = self._segments[parent]
        try:
            return self._plan_extension(request, parent, turns)
        except CannotExtend as error:
            return self._plan_start(request, error.reason, parent if segment.turns else None)

    def reserve(self, plan: Plan) -> Plan:
        """Claim the segment that a plan appends to, before its tokens are sampled.

        Returns the plan to use: when another request claimed the same segment since, this one forks instead.
        """
        if plan.starts_segment:
            return plan
        assert plan.parent is not None
        segment = self._segments[plan.parent]
        if segment.busy or len(segment.turns) != plan.turns:
            return replace(plan, fork_reason=ForkReason.CONCURRENT_REQUEST, starts_segment=True)
        segment.busy = True
        return plan

    def release(self, plan: Plan) -> None:
        """Give up a reserved plan: nothing was sampled."""
        if not plan.starts_segment and plan.parent is not None:
            self._segments[plan.parent].busy = False

    def commit(self, plan: Plan, sampled: Sampled, response: CanonicalMessage) -> int:
        """Record a sampled turn and the message that the client was given for it. Returns the segment's index."""
        if plan.starts_segment:
            segment = self._fork(plan)
            self._segments.append(segment)
            index = len(self._segments) - 1
        else:
            assert plan.parent is not None
            index = plan.parent
            segment = self._segments[index]
            segment.busy = False
            segment.token_ids.extend(plan.prompt_ids[len(segment.token_ids) :])
        start = len(segment.token_ids)
        segment.token_ids.extend(sampled.token_ids)
        segment.logprobs.extend(sampled.logprobs)
        for span in sampled.version_spans:
            _add_span(segment.version_spans, VersionSpan(span.version, start + span.start, start + span.end))
        segment.history = [*plan.history, response]
        segment.boundaries.append(plan.boundary)
        segment.turns.append(_Turn(len(segment.history), len(segment.token_ids), start, True))
        return index

    def drop_last_turn(self, index: int) -> bool:
        """Forget the last turn of a segment, which no client has seen. False: something was built on it."""
        segment = self._segments[index]
        if segment.busy:
            return False
        children = [s for s in self._segments if s.parent == index]
        if any(len(child.turns) and _carried(child) >= len(segment.turns) for child in children):
            return False
        turn = segment.turns.pop()
        del segment.logprobs[len(segment.logprobs) - (turn.num_tokens - turn.start) :]
        end = segment.turns[-1].num_tokens if segment.turns else 0
        del segment.token_ids[end:]
        segment.version_spans = [
            VersionSpan(s.version, s.start, min(s.end, end)) for s in segment.version_spans if s.start < end
        ]
        segment.boundaries.pop()
        segment.history = segment.history[: segment.turns[-1].num_messages] if segment.turns else []
        return True

    def prefix(self, index: int, num_tokens: int) -> list[int]:
        """The first ids of a segment: the prompt of one of its turns."""
        return self._segments[index].token_ids[:num_tokens].tolist()

    def segments(self) -> tuple[tuple[Segment, ...], dict[int, int]]:
        """The records, and where each commit's index went: segments whose every turn was dropped are left out."""
        kept = [i for i, s in enumerate(self._segments) if any(t.sampled_here for t in s.turns)]
        place = {old: new for new, old in enumerate(kept)}
        return tuple(_record(self._segments[i], place) for i in kept), place

    def _longest_shared(self, request: Request) -> tuple[int | None, int, bool]:
        """(segment, its turns that the request repeats, whether any segment had these tools); the longest wins.

        Among equals one that can be appended to comes first.
        """
        best: tuple[int, int, bool, int] | None = None
        same_context = False
        for index, segment in enumerate(self._segments):
            if segment.context_digest != request.context_digest:
                continue
            same_context = True
            turns = segment.turns_shared_with(request.history)
            if not turns:
                continue
            free = turns == len(segment.turns) and not segment.busy
            candidate = (segment.turns[turns - 1].num_messages, turns, free, -index)
            if best is None or candidate > best:
                best = candidate
        return (None, 0, same_context) if best is None else (-best[3], best[1], True)

    def _reason_to_start(self, request: Request, same_context: bool) -> str | None:
        if not self._segments:
            return None
        if not same_context:
            return ForkReason.CONTEXT_CHANGED
        repeats = any(message.role == "assistant" for message in request.history)
        return ForkReason.HISTORY_EDITED if repeats else ForkReason.NEW_CONVERSATION

    def _plan_extension(self, request: Request, parent: int, turns: int) -> Plan:
        segment = self._segments[parent]
        last = segment.turns[turns - 1]
        carried = segment.token_ids[: last.num_tokens]
        rendering = self._renderer.extend(
            request.messages,
            segment.sampled_messages(turns),
            segment.boundaries[:turns],
            carried[-1],
            request.tools,
            request.template_arguments,
        )
        at_end = turns == len(segment.turns)
        reason = None
        if not at_end:
            reason = ForkReason.HISTORY_EDITED
        elif segment.busy:
            reason = ForkReason.CONCURRENT_REQUEST
        return Plan(
            prompt_ids=carried + array(IDS, rendering.token_ids),
            parent=parent,
            turns=turns,
            fork_reason=reason,
            starts_segment=reason is not None,
            num_new_ids=len(rendering.token_ids),
            first_new_message=last.num_messages,
            boundary=rendering.boundary,
            generation_prompt=rendering.generation_prompt,
            history=tuple(segment.history[: last.num_messages]) + tuple(request.history[last.num_messages :]),
            context_digest=request.context_digest,
        )

    def _plan_start(self, request: Request, reason: str | None, parent: int | None) -> Plan:
        rendering = self._renderer.start(request.messages, request.tools, request.template_arguments)
        return Plan(
            prompt_ids=array(IDS, rendering.token_ids),
            parent=parent,
            turns=0,
            fork_reason=reason,
            starts_segment=True,
            num_new_ids=len(rendering.token_ids),
            first_new_message=0,
            boundary=rendering.boundary,
            generation_prompt=rendering.generation_prompt,
            history=tuple(request.history),
            context_digest=request.context_digest,
        )

    def _fork(self, plan: Plan) -> _Segment:
        """A new segment whose context is the plan's prompt."""
        reason = plan.fork_reason
        if reason is None and self._segments:  # two first requests at once: the other one was committed first
            reason = ForkReason.CONCURRENT_REQUEST
        segment = _Segment(plan.parent, reason, plan.context_digest, token_ids=array(IDS, plan.prompt_ids))
        if plan.turns:
            assert plan.parent is not None
            parent = self._segments[plan.parent]
            segment.boundaries = parent.boundaries[: plan.turns]
            segment.turns = [_Turn(t.num_messages, t.num_tokens, t.start, False) for t in parent.turns[: plan.turns]]
        return segment


def _carried(segment: _Segment) -> int:
    return sum(not turn.sampled_here for turn in segment.turns)


def _add_span(spans: list[VersionSpan], new: VersionSpan) -> None:
    if spans and spans[-1].version == new.version and spans[-1].end == new.start:
        spans[-1] = VersionSpan(new.version, spans[-1].start, new.end)
    else:
        spans.append(new)


def _record(segment: _Segment, place: Mapping[int, int]) -> Segment:
    num_tokens = len(segment.token_ids)
    mask_T = np.zeros(num_tokens, dtype=np.bool_)
    for turn in segment.turns:
        if turn.sampled_here:
            mask_T[turn.start : turn.num_tokens] = True
    logprobs_T = np.zeros(num_tokens, dtype=np.float32)
    logprobs_T[mask_T] = np.frombuffer(segment.logprobs, dtype=np.float32)
    return Segment(
        token_ids_T=np.array(segment.token_ids, dtype=np.int32),
        loss_mask_T=mask_T,
        logprobs_T=logprobs_T,
        version_spans=tuple(segment.version_spans),
        parent=place.get(segment.parent) if segment.parent is not None else None,
        fork_reason=segment.fork_reason,
    )
