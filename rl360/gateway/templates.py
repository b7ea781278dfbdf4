"""Chat templates: the ids of a first prompt, and the ids of only what is new in a later one.

In: normalised messages, tools, template arguments. Out: token ids to append. Left to others: which messages extend
which history (tokens.py), sampling.

How "what is new" is found. In the conversation, every message that the policy sampled is replaced by a marker: a word
that no text contains. The template renders the whole, and the text after the last marker is what follows the policy's
last words: the end of its turn, the new messages, the start of its next turn. This is exact for any template that
appends, whatever it inserts in front (a default system prompt, a date, tools) and whatever it drops from or adds to
past turns of the policy (thinking), since those tokens are never rendered again.

A template may also rewrite what stands in front of the last marker, such as one that moves the tools to the newest
question. Those tokens are kept as the policy saw them, and what is new is still the text after the last marker, as long
as all of it stands there. That holds when the text between the markers is what was rendered before. Where it is not, or
a marker is hidden, each new message is replaced by a word of its own, and every word has to come out behind the last
marker: in the whole conversation, or else in one that leaves out the policy's earlier turns. Only a template that puts
new messages in front of old ones cannot be appended to, and the caller starts a new segment.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl360.gateway.messages import REASONING_KEYS, digest
from rl360.gateway.tokenizer import TextTokenizer

# Some templates refuse an assistant message without a thinking field, even an empty one; the first that works is used.
THINKING_FIELDS: tuple[dict[str, str], ...] = ({}, {"reasoning_content": ""}, {"thinking": ""}, {"think": ""})


# What templates ask of `loop` for every message of a conversation: plain values, which need no look by the sandbox.
_LOOP_VALUES = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in _LOOP_VALUES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class TemplateRefused(ValueError):
    """The template raised: the conversation is not one that this model knows."""


class CannotExtend(Exception):
    """What is new cannot be told apart from what was. `reason` becomes the new segment's fork reason."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The first `length` characters of a stretch of text between two markers, by hash: what may not change later."""

    length: int
    text_hash: int


@dataclass(frozen=True, slots=True)
class Rendering:
    """Ids to append, and what a later rendering must still agree with."""

    token_ids: list[int]
    boundary: Boundary
    generation_prompt: str  # the text that opens the policy's turn


class ChatTemplate:
    """One tokenizer's chat template.

    Args:
        tokenizer: encodes, and carries the template source.
        clock: what the template's `strftime_now` tells for sessions without a time of their own.
    """

    def __init__(self, tokenizer: TextTokenizer, clock: Callable[[], datetime] = datetime.now) -> None:
        self.tokenizer = tokenizer
        self._clock = clock
        self._local = threading.local()
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._strftime_now
        self._plain = environment.from_string(tokenizer.template)
        self._tools = environment.from_string(tokenizer.tool_template) if tokenizer.tool_template else self._plain
        self._marker = f"mk{secrets.token_hex(12)}n"  # stands for a message of the policy
        self._word = f"wd{secrets.token_hex(12)}n"  # stands for a new message
        self._generation_prompts: dict[bytes, str] = {}
        self._assistant_fields: dict[str, str] = {}
        self._keeps_calls = False
        self._end_of_turn: int | None = None
        self._probe()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        now: datetime | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text. Raises TemplateRefused with the template's own words."""
        self._local.now = now
        template = self._tools if tools else self._plain
        names = {**self.tokenizer.special_names, "documents": None, **arguments}
        names |= {
            "messages": [self._with_fields(m) for m in messages] if self._assistant_fields else list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(names)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise TemplateRefused(f"the chat template refused the conversation: {error}") from error

    def start(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        now: datetime | None = None,
    ) -> Rendering:
        """The whole conversation as the prompt of a new sequence."""
        text = self.render(messages, tools, arguments, now)
        body = self._body(text, messages, tools, arguments, now)
        boundary = Boundary(len(body), hash(body))
        return Rendering(self.tokenizer.encode(text), boundary, text[len(body) :])

    def extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampled: Sequence[int],
        boundaries: Sequence[Boundary],
        last_id: int,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        now: datetime | None = None,
    ) -> Rendering:
        """What follows the policy's last turn.

        Args:
            messages: the whole conversation, the new messages included.
            sampled: indices of the messages that the policy sampled in this sequence, ascending, at least one.
            boundaries: of the renderings so far, one for each sampled message.
            last_id: the last token of the sequence, an end-of-turn token or (a turn cut short) any other.

        Raises CannotExtend or TemplateRefused.
        """
        marked = list(messages)
        for number, index in enumerate(sampled):
            marked[index] = self._marked(messages[index], number)
        text = self.render(marked, tools, arguments, now)
        pieces = self._split(text, len(sampled))
        if not _only_appends(pieces, boundaries, messages[sampled[-1] + 1 :]):
            num_new = len(messages) - 1 - sampled[-1]
            without_earlier_turns = [*marked[: sampled[0]], *marked[sampled[-1] :]]
            for candidate in (marked, without_earlier_turns):
                if self._puts_news_last(candidate, num_new, len(sampled) - 1, tools, arguments, now):
                    break
            else:
                shown = self._behind(text, len(sampled) - 1) is not None
                raise CannotExtend("template_moves_new_messages" if shown else "template_hides_history")
            marked, text = candidate, self.render(candidate, tools, arguments, now)
        tail = self._behind(text, len(sampled) - 1) or ""
        body = self._body(text, marked, tools, arguments, now)[len(text) - len(tail) :]
        boundary, generation_prompt = Boundary(len(body), hash(body)), tail[len(body) :]
        if self._keeps_calls and messages[sampled[-1]].get("tool_calls"):
            tail = self._after_calls(tail)
        return Rendering(self._encode_tail(tail, last_id), boundary, generation_prompt)

    def _puts_news_last(
        self,
        marked: Sequence[Mapping[str, Any]],
        num_new: int,
        last: int,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        now: datetime | None,
    ) -> bool:
        """Whether the template renders all of the `num_new` last messages behind the marker number `last`."""
        words = [self._word_text(number) for number in range(num_new)]
        old, new = marked[: len(marked) - num_new], marked[len(marked) - num_new :]
        try:
            text = self.render(
                [*old, *({**m, "content": word} for m, word in zip(new, words, strict=True))], tools, arguments, now
            )
        except TemplateRefused:
            return False
        tail = self._behind(text, last)
        return tail is not None and all(word in tail for word in words)

    def _encode_tail(self, tail: str, last_id: int) -> list[int]:
        """Ids of the text after the policy's words; an end-of-turn token that it sampled itself is not repeated."""
        ended_with = self.tokenizer.added.get(last_id)
        if ended_with and (rest := tail.lstrip()).startswith(ended_with):
            return self.tokenizer.encode_after(rest[len(ended_with) :], last_id)
        anchor = last_id if ended_with else self._end_of_turn
        return self.tokenizer.encode_after(tail, anchor)

    def _body(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        now: datetime | None,
    ) -> str:
        """`text` without the generation prompt."""
        key = digest(arguments)
        if key not in self._generation_prompts:
            one = [{"role": "user", "content": "x"}]
            opened = self.render(one, (), arguments, now)
            closed = self.render(one, (), arguments, now, add_generation_prompt=False)
            self._generation_prompts[key] = opened[len(closed) :] if opened.startswith(closed) else ""
        prompt = self._generation_prompts[key]
        if prompt and text.endswith(prompt):
            return text[: -len(prompt)]
        closed = self.render(messages, tools, arguments, now, add_generation_prompt=False)
        return closed if text.startswith(closed) else _common_prefix(text, closed)

    def _split(self, text: str, count: int) -> list[str]:
        """The text around the markers; empty when one of them is missing, repeated or out of order."""
        pieces = []
        start = 0
        for number in range(count):
            marker = self._marker_text(number)
            at = text.find(marker, start)
            if at < 0:
                return []
            pieces.append(text[start:at])
            start = at + len(marker)
        pieces.append(text[start:])
        return [] if self._marker in pieces[-1] else pieces

    def _behind(self, text: str, number: int) -> str | None:
        """The text behind a marker; None when it is hidden, or when some marker stands behind it, itself or another."""
        _, found, tail = text.partition(self._marker_text(number))
        return tail if found and self._marker not in tail else None

    def _after_calls(self, tail: str) -> str:
        """The tail from the token that ends the policy's turn on: its tool calls stand before it."""
        end = self.tokenizer.added[self._end_of_turn] if self._end_of_turn is not None else ""
        at = tail.find(end) if end else -1
        if at < 0:
            raise CannotExtend("template_hides_end_of_turn")
        return tail[at:]

    def _marker_text(self, number: int) -> str:
        return f"{self._marker}{number}e"

    def _word_text(self, number: int) -> str:
        return f"{self._word}{number}e"

    def _marked(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        plain: dict[str, Any] = {"role": "assistant", "content": self._marker_text(number)}
        if self._keeps_calls and message.get("tool_calls"):
            plain["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {}}} for call in message["tool_calls"]
            ]
        return plain

    def _with_fields(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] != "assistant":
            return message
        if any(key in message for key in (*REASONING_KEYS, "think")):
            return message
        return {**message, **self._assistant_fields}

    def _strftime_now(self, pattern: str) -> str:
        return (self._local.now or self._clock()).strftime(pattern)

    def _probe(self) -> None:
        """Learn from small conversations what this template needs to render a marker, and how a turn ends."""
        user = {"role": "user", "content": "x"}
        assistant = {"role": "assistant", "content": self._marker_text(0)}
        for fields in THINKING_FIELDS:
            self._assistant_fields = fields
            if (text := self._try([user, assistant, user])) and text.count(self._marker) == 1:
                break
        else:
            self._assistant_fields = {}
        closed = self._try([user, assistant], add_generation_prompt=False)
        if closed and self._marker in closed:
            found = self.tokenizer.first_added(closed[closed.index(self._marker) + len(self._marker_text(0)) :])
            self._end_of_turn = found[1] if found else None
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        answer = {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": "f"}
        if self._try([user, assistant, answer]) is None:
            self._keeps_calls = self._try([user, {**assistant, "tool_calls": [call]}, answer]) is not None

    def _try(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str | None:
        try:
            return self.render(messages, (), {}, None, add_generation_prompt)
        except TemplateRefused:
            return None


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for other tools; here it renders its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _only_appends(pieces: Sequence[str], boundaries: Sequence[Boundary], new: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the text in front of the last marker is what was rendered before, and shows nothing of what is new.

    Between what was rendered and the marker stands the opening of the policy's turn, which may differ from the
    generation prompt, so it is not compared; a template could put a new message there.
    """
    texts = [text for message in new if (text := message["content"].strip())]
    clean: set[str] = set()  # openings in which nothing new stands: mostly one and the same
    for piece, boundary in zip(pieces, boundaries, strict=False):
        if hash(piece[: boundary.length]) != boundary.text_hash:
            return False
        opening = piece[boundary.length :]
        if opening not in clean:
            if any(text in opening for text in texts):
                return False
            clean.add(opening)
    return bool(pieces) and bool(boundaries)


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """Templates were written for JSON that keeps non-ASCII text and does not escape HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _common_prefix(a: str, b: str) -> str:
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]
