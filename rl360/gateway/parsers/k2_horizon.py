"""K2 Horizon: reasoning in one of three think tags, tool calls in `<ifm|tool_calls>`.

In: a turn's text and the generation prompt, then the text after the reasoning and the tools that were offered. Out:
reasoning and the rest; content and calls. A call that cannot be read stays in the content as it was written.

The generation prompt opens the reasoning (`<ifm|think>`, `<ifm|think_fast>` or `<ifm|think_faster>`, by effort), so a
turn begins inside it. A turn that begins its calls without closing the reasoning has ended it there. A call is

    <ifm|tool_call>NAME
    <ifm|arg_key>KEY</ifm|arg_key>
    <ifm|arg_value>VALUE</ifm|arg_value>
    </ifm|tool_call>

with an optional `<ifm|arg_type>TYPE</ifm|arg_type>` before a value, or JSON between the same tags. Strings stand as
plain text, objects and lists as JSON; numbers and truth values are told from strings by the tool's own schema.

The format is as public servers and templates have it; it was not run against the model's own tokenizer here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl360.gateway.parsers.base import ParsedCall
from rl360.gateway.parsers.hermes import read_json_call

OPEN = re.compile(r"<ifm\|(think|think_fast|think_faster)>")
CLOSE = re.compile(r"</ifm\|(?:think|think_fast|think_faster)>")
GROUP = "<ifm|tool_calls>"
CALL = re.compile(r"<ifm\|tool_call>(.*?)</ifm\|tool_call>", re.DOTALL)
EMPTY_GROUP = re.compile(r"<ifm\|tool_calls>\s*</ifm\|tool_calls>")
NAME = re.compile(r"\s*([\w.-]+)\s*")
ARGUMENT = re.compile(
    r"\s*<ifm\|arg_key>(.*?)</ifm\|arg_key>\s*(?:<ifm\|arg_type>(.*?)</ifm\|arg_type>\s*)?"
    r"<ifm\|arg_value>(.*?)</ifm\|arg_value>\s*",
    re.DOTALL,
)


class K2HorizonReasoning:
    def split(self, text: str, generation_prompt: str) -> tuple[str | None, str]:
        prompt = generation_prompt.rstrip()
        opened = [match.end() for match in OPEN.finditer(prompt)]
        inside = bool(opened) and opened[-1] == len(prompt)
        written = OPEN.match(text.lstrip())
        if not inside and not written:
            return None, text
        body = text.lstrip()[written.end() :] if written else text
        close = CLOSE.search(body)
        group = body.find(GROUP)
        if close is None and group < 0:
            return body.strip("\n"), ""  # cut inside its reasoning
        if close is None or 0 <= group < close.start():
            return body[:group].strip("\n"), body[group:]
        return body[: close.start()].strip("\n"), body[close.end() :].lstrip("\n")


class K2HorizonTools:
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ParsedCall, ...]]:
        calls: list[ParsedCall] = []

        def take(match: re.Match[str]) -> str:
            call = _read(match.group(1), tools)
            if call is None:
                return match.group(0)
            calls.append(call)
            return ""

        content = CALL.sub(take, text)
        return (EMPTY_GROUP.sub("", content).strip(), tuple(calls)) if calls else (text, ())


def _read(body: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCall | None:
    if body.lstrip().startswith("{"):
        return read_json_call(body)
    name = NAME.match(body)
    if name is None:
        return None
    types = _types(name.group(1), tools)
    arguments: dict[str, Any] = {}
    at = name.end()
    while at < len(body):
        argument = ARGUMENT.match(body, at)
        if argument is None:
            return None
        key, said, value = argument.group(1).strip(), argument.group(2), argument.group(3)
        arguments[key] = _value(value, [said.strip()] if said else types.get(key, []))
        at = argument.end()
    return ParsedCall(name.group(1), json.dumps(arguments, ensure_ascii=False))


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The types that the offered tool's schema gives its arguments."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: _type_names(schema) for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _type_names(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else [str(part) for part in kind]


def _value(text: str, types: Sequence[str]) -> Any:
    """Plain text where a string may stand; else JSON, or the text when it is none: the agent says what is wrong."""
    if not types or "string" in types:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
