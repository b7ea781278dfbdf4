"""The two halves of a parser and how they combine.

In: text. Out: reasoning, content, calls. What a parser does not understand stays in the content: nothing that the
policy wrote is lost on the agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
        reasoning, rest = self.reasoning.split(text, generation_prompt)
        content, calls = self.tools.parse(rest, tools) if tools else (rest, ())
        return ParsedTurn(content, reasoning or None, calls)
