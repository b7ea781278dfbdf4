"""What counts as the same message."""

from __future__ import annotations

from typing import Any

import pytest

from rl360.gateway.messages import MessageError, canonical, normalise


def form(message: dict[str, Any]) -> Any:
    return canonical(normalise(message, "m"))


def call(arguments: object, **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}],
        **fields,
    }


@pytest.mark.parametrize(
    "same",
    [
        call('{"b": 2, "a": "x"}'),
        call('{ "a" : "x",\n "b": 2 }'),
        call({"a": "x", "b": 2}),
        call('{"a": "x", "b": 2}', content=""),
        call('{"a": "x", "b": 2}', content=[]),
        call('{"a": "x", "b": 2}', function_call=None, refusal=None, annotations=[], audio=None),
        {**call('{"a": "x", "b": 2}'), "tool_calls": [{"function": {"name": "bash", "arguments": '{"a":"x","b":2}'}}]},
    ],
)
def test_serialisation_is_not_an_edit(same: dict[str, Any]) -> None:
    assert form(same).continues(form(call('{"a": "x", "b": 2}')), sampled=True)


@pytest.mark.parametrize(
    "other",
    [
        call('{"a": "y", "b": 2}'),
        call('{"a": "x"}'),
        call('{"a": "x", "b": 2}', content="."),
        {"role": "assistant", "content": ""},
        call("not json"),
    ],
)
def test_another_call_is_an_edit(other: dict[str, Any]) -> None:
    assert not form(other).continues(form(call('{"a": "x", "b": 2}')), sampled=True)


def test_reasoning_may_be_absent_but_not_different() -> None:
    returned = form({"role": "assistant", "content": "a", "reasoning_content": "why"})
    assert form({"role": "assistant", "content": "a"}).continues(returned, sampled=True)
    assert not form({"role": "assistant", "content": "a"}).continues(returned, sampled=False)
    assert form({"role": "assistant", "content": "a", "reasoning": "why"}).continues(returned, sampled=True)
    assert not form({"role": "assistant", "content": "a", "reasoning_content": "no"}).continues(returned, sampled=True)


def test_text_parts_become_one_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert normalise(parts, "m")["content"] == "a\nb"
    with pytest.raises(MessageError, match=r"messages\[2\].content\[0\]: only text parts"):
        normalise({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[2]")


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"content": "a"}, "m.role"),
        ({"role": "user", "content": 3}, "m.content"),
        ({"role": "assistant", "tool_calls": "x"}, "m.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "m.tool_calls[0].function.name"),
    ],
)
def test_an_unusable_message_names_its_field(message: dict[str, Any], where: str) -> None:
    with pytest.raises(MessageError) as caught:
        normalise(message, "m")
    assert caught.value.param == where
