"""Hermes tool calls, which Qwen 2.5 and Qwen 3 use: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

In: the text after the reasoning. Out: content and calls. A call that is not JSON, has no name, or was never closed
stays in the content as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl360.gateway.json_text import TooDeep, read_json
from rl360.gateway.parsers.base import ParsedCall, take_calls

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesTools:
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ParsedCall, ...]]:
        content, calls = take_calls(text, OPEN, CLOSE, read_json_call)
        # The white space around calls belongs to them; without calls the content is exactly what was sampled.
        return (content.strip(), calls) if calls else (text, ())


def read_json_call(body: str) -> ParsedCall | None:
    """A call written as a JSON object with name and arguments; None when it is not one, or nested out of reason."""
    try:
        call = read_json(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            read_json(arguments)
        except TooDeep:  # the agent's own parser would fall over it
            return None
        except ValueError:
            pass  # the agent says what is wrong with it
        return ParsedCall(call["name"], arguments)
    return ParsedCall(call["name"], json.dumps(arguments, ensure_ascii=False))
