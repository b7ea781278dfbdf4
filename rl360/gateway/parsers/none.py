"""No reasoning and no tool calls: the text is the content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl360.gateway.parsers.base import ParsedCall


class NoReasoning:
    def split(self, text: str, generation_prompt: str) -> tuple[str | None, str]:
        return None, text


class NoTools:
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ParsedCall, ...]]:
        return text, ()
