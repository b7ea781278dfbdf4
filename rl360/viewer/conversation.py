"""The turns of an attempt: new messages of each request, and the model's answer.

In: turns of a trajectory row, whose messages may have any shape that an agent or a model made. Out: markup, all of it
as text. What is not a known field of a message is shown as JSON rather than left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl360.viewer.html import Html, el, join, number, seconds
from rl360.viewer.layout import mark, section

TURNS_A_PAGE = 40
MAX_CHARS = 40_000  # of one text; the row as JSON has all of it
KNOWN_FIELDS = frozenset({"role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name"})
ROLES = frozenset({"system", "user", "assistant", "tool"})


def conversation(turns: Sequence[Mapping[str, Any]], first: int, link: Callable[[int], str]) -> Html:
    """TURNS_A_PAGE turns from `first` on; `link` gives the address of the part that begins at a turn."""
    shown = turns[first : first + TURNS_A_PAGE]
    pages = None
    if len(turns) > TURNS_A_PAGE:
        starts = range(0, len(turns), TURNS_A_PAGE)
        pages = el(
            "p",
            "turns ",
            *[
                el(
                    "a",
                    f"{at + 1}\u2013{min(len(turns), at + TURNS_A_PAGE)}",
                    href=link(at),
                    class_="gap here" if at == first else "gap",
                )
                for at in starts
            ],
            class_="pager",
        )
    parts = [_turn(number_, turn) for number_, turn in enumerate(shown, first)]
    nothing = el("p", "The model was not called.", class_="dim") if not turns else None
    return section(
        "Conversation",
        pages,
        *parts,
        nothing,
        pages,
        id_="turns",
        aside="1 turn" if len(turns) == 1 else f"{len(turns)} turns",
    )


def _turn(index: int, turn: Mapping[str, Any]) -> Html:
    told = (
        f"turn {index + 1} \u00b7 {turn['finish_reason']} \u00b7 {number(turn['prompt_tokens'])} prompt tokens, "
        f"{number(turn['completion_tokens'])} sampled \u00b7 engine {seconds(turn['engine_wait_s'])}"
    )
    return el(
        "div",
        *[_message(message) for message in turn["request_messages"]],
        _message(turn["response_message"], answer=True),
        el(
            "p",
            told,
            f" \u00b7 segment {turn['segment']}" if turn["segment"] else None,
            mark("cut at the token limit", "warn") if turn["finish_reason"] == "length" else None,
            class_="dim told",
        ),
        class_="turn",
        id=f"turn-{index}",
    )


def _message(message: Mapping[str, Any], answer: bool = False) -> Html:
    role = str(message.get("role") or ("assistant" if answer else "?"))
    thought = message.get("reasoning_content") or message.get("reasoning")
    rest = {key: value for key, value in message.items() if key not in KNOWN_FIELDS and value not in (None, [], {})}
    return el(
        "div",
        el("span", role, *_of_call(message), class_="role"),
        el("details", el("summary", "reasoning"), _text(thought), open=True) if thought else None,
        _content(message.get("content")),
        *[_tool_call(call) for call in message.get("tool_calls") or ()],
        el("details", el("summary", "other fields"), el("pre", _json(rest))) if rest else None,
        class_=f"message {role if role in ROLES else 'other'}{' answer' if answer else ''}",
    )


def _of_call(message: Mapping[str, Any]) -> list[str]:
    return [f" {message[key]}" for key in ("name", "tool_call_id") if message.get(key)]


def _content(content: object) -> Html | None:
    if content is None or content == "":
        return None
    if isinstance(content, str):
        return _text(content)
    if isinstance(content, list):
        return join(*[_content_part(part) for part in content])
    return el("pre", _json(content))


def _content_part(part: object) -> Html:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return _text(part["text"])
    return el("pre", _json(part))


def _tool_call(call: object) -> Html:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return el("pre", _json(call), class_="call")
    arguments = function.get("arguments")
    return el("div", el("b", function.get("name")), _text(_arguments(arguments)), class_="call")


def _arguments(value: object) -> str:
    """One `name: value` a line, texts as they are, so that a script keeps its lines; as it is if not JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if not isinstance(value, Mapping):
        return _json(value)
    return "\n".join(f"{key}: {item if isinstance(item, str) else _json(item)}" for key, item in value.items())


def _text(text: object) -> Html:
    whole = str(text)
    kept = whole[:MAX_CHARS]
    cut = el("p", f"{len(whole) - MAX_CHARS:,} more characters", class_="dim") if len(whole) > MAX_CHARS else None
    return join(el("pre", kept), cut)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
