"""Shapes of requests, answers, streams and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl360.gateway.openai_api import (
    ChatRequest,
    RequestError,
    completion,
    context_length_error,
    parse_request,
    stream_events,
)
from tests.gateway.kit import TOOLS

HELLO = [{"role": "user", "content": "hello"}]


def parse(**fields: Any) -> Any:
    return parse_request(json.dumps({"messages": HELLO, **fields}).encode())[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": 3}]}, "messages[0].role"),
        ({"tools": {}}, None),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
def test_a_bad_request_names_its_field(fields: dict[str, Any], param: str | None) -> None:
    if param is None:  # falsy fields count as absent
        parse(**fields)
        return
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_not_json() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        parse_request(b"{")


def test_a_retry_has_the_same_key() -> None:
    key = parse().key
    assert parse(stream=True, temperature=0.3, user="x", unknown=[1], max_tokens=3).key == key
    assert parse(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": None}]).key == key
    for other in ({"seed": 1}, {"tools": TOOLS}, {"chat_template_kwargs": {"a": 1}}, {"messages": HELLO * 2}):
        assert parse(**other).key != key


def test_where_one_message_ends_matters_to_the_key() -> None:
    split = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert parse(messages=split).key != parse(messages=[{"role": "user", "content": "a\nb"}]).key


def test_the_context_length_error_is_the_one_that_clients_know() -> None:
    body = context_length_error("2 turns").payload()["error"]
    assert body["code"] == "context_length_exceeded"
    assert body["message"].startswith("This model's maximum context length is")
    assert body["type"] == "invalid_request_error"


def test_a_stream_says_the_same_as_the_completion() -> None:
    calls = [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    message = {"role": "assistant", "content": "é" * 150, "reasoning_content": "why", "tool_calls": calls}
    payload = completion(
        completion_id="x",
        model="m",
        message=message,
        finish_reason="tool_calls",
        prompt_tokens=3,
        completion_tokens=4,
        cached_tokens=2,
        extra={"engine": [{"meta_info": {"something_new": 1}}]},
    )
    events = list(stream_events(payload, include_usage=True))
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(d.get("content", "") for d in deltas) == message["content"]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "why"
    streamed = [call for d in deltas for call in d.get("tool_calls", [])]
    assert streamed == [{"index": 0, **calls[0]}]
    assert chunks[-1]["usage"] == payload["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-2]["rl360"] == payload["rl360"]
    assert all("usage" not in json.loads(e[6:]) for e in list(stream_events(payload, False))[:-1])


def test_what_came_before_is_taken_from_there_only_if_it_is_the_same_text() -> None:
    """1, 1.0 and true are equal in Python, and not the same message."""

    def call(value: object) -> dict[str, object]:
        function = {"name": "f", "arguments": {"x": value}}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}

    def request(*messages: dict[str, object], before: ChatRequest | None = None) -> ChatRequest:
        return parse_request(json.dumps({"messages": messages}).encode(), before)[0]

    user = {"role": "user", "content": "x"}
    first = request(user, call(1))
    again = request(user, call(1), user, before=first)
    assert (again.history[:2], again.messages[:2]) == (first.history, first.messages)
    assert again.messages[1] is first.messages[1]
    for value in (True, 1.0, "1"):
        changed = request(user, call(value), user, before=first)
        alone = request(user, call(value), user)
        assert (changed.key, changed.history) == (alone.key, alone.history)
        assert changed.key != again.key
    assert again.key == request(user, call(1), user).key
