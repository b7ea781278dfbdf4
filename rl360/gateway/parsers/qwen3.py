"""Qwen 3 reasoning: `<think>...</think>` in front of the answer.

In: a turn's text and the generation prompt. Out: reasoning and the rest. A turn that was cut inside its reasoning is
all reasoning; a turn that neither opens nor was opened inside a think block has none.
"""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


class Qwen3Reasoning:
    def split(self, text: str, generation_prompt: str) -> tuple[str | None, str]:
        inside = generation_prompt.rstrip().endswith(OPEN)
        stripped = text.lstrip()
        if not inside and not stripped.startswith(OPEN):
            return None, text
        body = stripped.removeprefix(OPEN)
        reasoning, closed, rest = body.partition(CLOSE)
        return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""
