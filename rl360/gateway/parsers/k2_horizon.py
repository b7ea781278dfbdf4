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

from rl360.gateway.json_text import read_json
from rl360.gateway.parsers.base import ParsedCall, take_calls
from rl360.gateway.parsers.hermes import read_json_call

OPEN = re.compile(r"<ifm\|(think|think_fast|think_faster)>")
CLOSE = re.compile(r"</ifm\|(?:think|think_fast|think_faster)>")
GROUP = "<ifm|tool_calls>"
EMPTY_GROUP = re.compile(r"<ifm\|tool_calls>\s*</ifm\|tool_calls>")
NAME = re.compile(r"\s*([\w.-]+)\s*")
SPACE = re.compile(r"\s*")
# Schemas come with the request, from an agent: deeper or wider ones than these are text, and cost nothing.
MAX_SCHEMA_DEPTH = 4
MAX_ALTERNATIVES = 16


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
        content, calls = take_calls(text, "<ifm|tool_call>", "</ifm|tool_call>", lambda body: _read(body, tools))
        return (EMPTY_GROUP.sub("", content).strip(), calls) if calls else (text, ())


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
        key, at = _tagged(body, at, "arg_key")
        said, at = _tagged(body, at, "arg_type")
        value, at = _tagged(body, at, "arg_value")
        if key is None or value is None:
            return None
        key = key.strip()
        arguments[key] = _value(value, [said.strip()] if said else types.get(key, []))
    return ParsedCall(name.group(1), json.dumps(arguments, ensure_ascii=False))


def _tagged(body: str, at: int, tag: str) -> tuple[str | None, int]:
    """(what stands in the tag at this place, where the next thing begins); None: no tag here, or never closed."""
    start, end = f"<ifm|{tag}>", f"</ifm|{tag}>"
    at = _after_space(body, at)
    close = body.find(end, at + len(start)) if body.startswith(start, at) else -1
    if close < 0:
        return None, at
    return body[at + len(start) : close], _after_space(body, close + len(end))


def _after_space(body: str, at: int) -> int:
    space = SPACE.match(body, at)
    return space.end() if space else at


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The types that the offered tool's schema gives its arguments."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            root = function.get("parameters") or {}
            properties = root.get("properties") or {}
            return {key: _type_names(schema, root) for key, schema in properties.items()}
    return {}


def _type_names(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[str]:
    """Every type that a schema allows, through references, alternatives and enumerations; empty: it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return []
    if kind := schema.get("type"):
        return [kind] if isinstance(kind, str) else [str(part) for part in kind]
    if reference := schema.get("$ref"):
        return _type_names(_referred(str(reference), root), root, depth + 1)
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ["string" if isinstance(value, str) else "other" for value in values]
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or []]
    return [found for part in parts[:MAX_ALTERNATIVES] for found in _type_names(part, root, depth + 1)]


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the same schema (`#/$defs/Name`) points to; None for any other."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else [reference]:
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def _value(text: str, types: Sequence[str]) -> Any:
    """Plain text where a string may stand; else JSON, or the text when it is none: the agent says what is wrong."""
    if not types or "string" in types:
        return text
    try:
        return read_json(text)
    except ValueError:
        return text
