"""No reasoning and no tool calls: the text is the content."""

from __future__ import annotations

from rl360.gateway.parsers.base import ParsedCall


class NoReasoning:
    def split(self, text: str, generation_prompt: str) -> tuple[str | None, str]:
        return None, text


class NoTools:
    def parse(self, text: str) -> tuple[str, tuple[ParsedCall, ...]]:
        return text, ()
