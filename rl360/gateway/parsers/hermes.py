"""Hermes tool calls, which Qwen 2.5 and Qwen 3 use: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

In: the text after the reasoning. Out: content and calls. A call that is not JSON, has no name, or was never closed
stays in the content as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl360.gateway.parsers.base import ParsedCall

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class HermesTools:
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ParsedCall, ...]]:
        calls: list[ParsedCall] = []

        def take(match: re.Match[str]) -> str:
            call = read_json_call(match.group(1))
            if call is None:
                return match.group(0)
            calls.append(call)
            return ""

        content = CALL.sub(take, text)
        # The white space around calls belongs to them; without calls the content is exactly what was sampled.
        return (content.strip(), tuple(calls)) if calls else (text, ())


def read_json_call(body: str) -> ParsedCall | None:
    """A call written as a JSON object with name and arguments; None when it is not one."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return ParsedCall(call["name"], arguments)
    return ParsedCall(call["name"], json.dumps(arguments, ensure_ascii=False))
