"""Over random chats: what is trained on is what was sampled, once, and nothing forks unless the history was edited."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl360.gateway.openai_api import RequestError
from rl360.types import Session
from tests.gateway.kit import END_OF_TURN, TOOLS
from tests.gateway.kit_session import Agent, agent
from tests.gateway.stub_engine import Fault, Sample

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": [1, 2.5, null]}}\n</tool_call>'
TEXTS = [
    "",
    " spaced  out \n",
    "<think>\nlet me\n</think>\n\nthe answer",
    "thinking goes on</think>\n\nthe answer",
    f"let me\n{CALL}",
    f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}",
    '<tool_call>\n{"name": bash}\n</tool_call>',
    "```python\nprint('hello')\n```",
    "a <|im_start|>user\nfake <think> tag",
    "naïve 日本語 \U0001f600",
    r'<tool_call>{"name": "ba\udc00sh", "arguments": {"command": "ls \ud800", "\udfff": ["\ud83d\ude00"]}}</tool_call>',
    r'<tool_call>{"name": "bash", "arguments": "{\"command\": \"ls \\ud800\"}"}</tool_call>',
    '<tool_call>{"name":"bash","arguments":' + "[" * 1500 + "</tool_call>",
]
step = st.fixed_dictionaries(
    {
        "text": st.none() | st.sampled_from(TEXTS),
        "fault": st.none()
        | st.sampled_from([Fault("status", 500), Fault("refused"), Fault("abort", keep=0), Fault("abort", keep=3)]),
        "retries": st.integers(0, 2),
        "keep_reasoning": st.booleans(),
        "rewrite": st.booleans(),
        "num_new": st.integers(1, 3),
        "edit": st.sampled_from(["none"] * 6 + ["first", "assistant", "drop", "fresh"]),
    }
)


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """The same message the way some client libraries send it back."""
    new = {**message, "refusal": None, "function_call": None}
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            arguments = json.dumps(
                json.loads(call["function"]["arguments"]), indent=1, sort_keys=True, ensure_ascii=False
            )
            calls.append({"type": "function", "function": {"arguments": arguments, "name": call["function"]["name"]}})
        new["tool_calls"] = calls
        new["content"] = message["content"] or ""
    else:
        new["content"] = [{"type": "text", "text": message["content"]}]
    return new


def edited(messages: list[dict[str, Any]], how: str, at: int) -> list[dict[str, Any]]:
    """An edit of the history that templates with strict roles accept too. `at` keeps two apart: the same is a retry."""
    if how == "first":
        return [{**messages[0], "content": messages[0]["content"] + " edited"}, *messages[1:]]
    if how == "fresh":
        return [{"role": "user", "content": f"fresh {at}"}]
    sampled = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if how == "assistant" and sampled:
        changed = {**messages[sampled[-1]], "content": "not what was said"}
        return [*messages[: sampled[-1]], changed, *messages[sampled[-1] + 1 :]]
    if how == "drop" and sampled:
        return [*messages[: sampled[-1]], {"role": "user", "content": f"instead {at}"}]
    return messages


async def chat(driven: Agent, steps: list[dict[str, Any]], seed: int) -> tuple[Session, bool]:
    """Run the steps; returns the record and whether the history was edited."""
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "be brief"})
    was_edited = False
    for number, todo in enumerate(steps):
        if todo["edit"] != "none" and number:
            before = list(messages)
            messages = edited(messages, todo["edit"], number)
            was_edited |= messages != before
        if todo["text"] is not None:
            driven.model.script.append(todo["text"])
        if todo["fault"]:
            driven.model.faults.append(todo["fault"])
        try:
            message = await driven.say(messages, tools=TOOLS)
        except RequestError as error:
            if error.status < 500:
                raise
            message = await driven.say(messages, tools=TOOLS)
        for _ in range(todo["retries"]):
            assert await driven.say(messages, tools=TOOLS) == message
        driven.model.script.clear()
        driven.model.faults.clear()
        message = json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))  # over the wire
        if not todo["keep_reasoning"]:
            message.pop("reasoning_content", None)
        messages = [*messages, rewritten(message) if todo["rewrite"] else message]
        if message.get("tool_calls"):
            messages += [
                {"role": "tool", "content": f"out {i}", "tool_call_id": call["id"]}
                for i, call in enumerate(message["tool_calls"])
            ]
        else:
            messages += [{"role": "user", "content": f"next {i} {rng.random()}"} for i in range(todo["num_new"])]
    return await driven.session.close(), was_edited


def check_truth(session: Session, samples: list[Sample]) -> None:
    """Each sample has mask 1 in exactly one segment, behind the very prompt that it was sampled for."""
    for sample in samples:
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.ids)
        owners = 0
        for segment in session.segments:
            if segment.token_ids_T[:end].tolist() != [*sample.prompt, *sample.ids] or not sample.ids:
                continue
            if not segment.loss_mask_T[start:end].any():
                continue
            owners += 1
            assert segment.loss_mask_T[start:end].all()
            np.testing.assert_array_equal(segment.logprobs_T[start:end], np.float32(sample.logprobs))
            versions = {s.version for s in segment.version_spans if s.start < end and s.end > start}
            assert versions == {sample.version}
        assert owners == bool(sample.ids)
    total = sum(len(sample.ids) for sample in samples)
    assert sum(int(s.loss_mask_T.sum()) for s in session.segments) == total
    assert sum(turn.completion_tokens for turn in session.turns) == total
    for segment in session.segments:
        covered = np.zeros(segment.token_ids_T.size, dtype=bool)
        for span in segment.version_spans:
            assert not covered[span.start : span.end].any()
            covered[span.start : span.end] = True
        np.testing.assert_array_equal(covered, segment.loss_mask_T)
        assert (segment.logprobs_T[~segment.loss_mask_T] == 0).all()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    template=st.sampled_from(sorted(END_OF_TURN)),
    steps=st.lists(step, min_size=1, max_size=7),
    max_new_tokens=st.sampled_from([5, 20, 200]),
    seed=st.integers(0, 1000),
)
def test_trained_ids_are_the_sampled_ids(
    template: str, steps: list[dict[str, Any]], max_new_tokens: int, seed: int
) -> None:
    with agent(template, max_new_tokens=max_new_tokens) as driven:
        driven.session._services = _without_truncation_cap(driven)
        session, was_edited = asyncio.run(chat(driven, steps, seed))
    check_truth(session, driven.model.samples)
    assert session.stop is None or session.turns[-1].finish_reason == "length"
    assert session.retries_deduplicated == sum(todo["retries"] for todo in steps)
    assert [s.fork_reason is None for s in session.segments] == [i == 0 for i in range(len(session.segments))]
    if not was_edited:
        assert len(session.segments) == 1, [s.fork_reason for s in session.segments]
    for index, segment in enumerate(session.segments):
        assert segment.parent is None or segment.parent < index


def _without_truncation_cap(driven: Agent) -> Any:
    from dataclasses import replace

    return replace(driven.session._services, max_truncated_turns=1000)


@pytest.mark.parametrize("template", sorted(END_OF_TURN))
def test_a_long_chat_is_one_segment(template: str) -> None:
    steps = [
        {
            "text": TEXTS[i % len(TEXTS)],
            "fault": None,
            "retries": 0,
            "keep_reasoning": i % 2 == 0,
            "rewrite": i % 3 == 0,
            "num_new": 1 + i % 2,
            "edit": "none",
        }
        for i in range(40)
    ]
    with agent(template, max_new_tokens=200) as driven:
        session, _ = asyncio.run(chat(driven, steps, 0))
    check_truth(session, driven.model.samples)
    assert len(session.segments) == 1
    assert len(session.turns) == 40
