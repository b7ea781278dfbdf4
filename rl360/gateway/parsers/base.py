"""The two halves of a parser and how they combine.

In: text. Out: reasoning, content, calls. What a parser does not understand stays in the content: nothing that the
policy wrote is lost on the agent. The policy writes anything: parsers are linear in the text, and one that fails has
met a malformed reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

MAX_CALLS = 128  # in one reply; what follows stays in the content


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call; `arguments` is JSON text, as OpenAI sends it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]


class ReasoningParser(Protocol):
    def split(self, text: str, generation_prompt: str) -> tuple[str | None, str]:
        """(reasoning, rest). The generation prompt tells whether the turn began inside the reasoning."""
        ...


class ToolParser(Protocol):
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ParsedCall, ...]]:
        """(content, calls); a call that cannot be read stays in the content. `tools` as the request offered them."""
        ...


@dataclass(frozen=True, slots=True)
class TurnParser:
    """A model family's parser: reasoning first, then calls in what is left."""

    reasoning: ReasoningParser
    tools: ToolParser

    def parse(self, text: str, generation_prompt: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        """Parse one turn. `tools`: what the request offered; without any, no calls are looked for."""
        try:
            reasoning, rest = self.reasoning.split(text, generation_prompt)
        except Exception:
            log.exception("the reasoning parser failed on %d characters; they are the content", len(text))
            reasoning, rest = None, text
        try:
            content, calls = self.tools.parse(rest, tools) if tools else (rest, ())
        except Exception:
            log.exception("the tool parser failed on %d characters; they are the content", len(rest))
            content, calls = rest, ()
        return ParsedTurn(content, reasoning or None, calls)


def take_calls(
    text: str, start: str, end: str, read: Callable[[str], ParsedCall | None]
) -> tuple[str, tuple[ParsedCall, ...]]:
    """Take the calls between `start` and `end` out of a text, at most MAX_CALLS; what `read` answers None to stays."""
    kept: list[str] = []
    calls: list[ParsedCall] = []
    done = 0  # the text up to here is in `kept` or in `calls`
    at = text.find(start)
    while at >= 0 and len(calls) < MAX_CALLS:
        body = at + len(start)
        close = text.find(end, body)
        if close < 0:
            break
        after = close + len(end)
        call = read(text[body:close])
        if call is not None:
            kept.append(text[done:at])
            calls.append(call)
            done = after
        at = text.find(start, after)
    return "".join([*kept, text[done:]]), tuple(calls)
