"""Caps, retries, failures, clients that hang up, and calls side by side."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rl360.gateway.openai_api import RequestError
from rl360.types import Stop
from tests.gateway.kit import TOOLS, tokenizer_of
from tests.gateway.kit_session import Agent, agent
from tests.gateway.stub_engine import Fault
from tests.gateway.test_random_chats import CALL, check_truth

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def then(message: dict[str, Any], text: str = "next", before: list[dict[str, Any]] = HELLO) -> list[dict[str, Any]]:
    return [*before, message, {"role": "user", "content": text}]


async def refused(driven: Agent, messages: list[dict[str, Any]]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await driven.ask(messages)
    return caught.value


async def test_the_turn_cap() -> None:
    with agent(max_turns=2) as driven:
        first = await driven.say(HELLO)
        messages = then(first)
        second = await driven.say(messages)
        error = await refused(driven, then(second, before=messages))
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "2 turns are used up" in str(error)
        assert await driven.say(messages) == second  # a retry of an answered turn is no turn
        session = await driven.session.close()
    assert (session.stop, session.cause, len(session.turns)) == (Stop.TURNS, None, 2)


async def test_a_session_that_ends_by_itself_has_no_stop() -> None:
    with agent(max_turns=1) as driven:
        driven.model.script.append("done")
        await driven.ask(HELLO)
        session = await driven.session.close()
    assert session.stop is None


async def test_the_context_cap_shortens_a_turn_and_then_ends_the_session() -> None:
    prompt = len(tokenizer_of().encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))
    with agent(max_context_tokens=prompt + 3, max_new_tokens=50) as driven:
        driven.model.script.append("one two three four five")
        payload = await driven.ask(HELLO)
        assert payload["choices"][0]["finish_reason"] == "length"
        assert payload["usage"]["completion_tokens"] == 3
        assert driven.model.samples[0].params["max_new_tokens"] == 3
        error = await refused(driven, then(payload["choices"][0]["message"]))
        assert error.code == "context_length_exceeded"
        assert (await refused(driven, [{"role": "user", "content": "short"}])).code == "context_length_exceeded"
        session = await driven.session.close()
    assert (session.stop, len(session.turns), session.truncated_turns) == (Stop.LENGTH, 1, 1)
    assert driven.model.num_requests == 1


async def test_truncated_turns_are_capped_and_the_last_one_decides_the_stop() -> None:
    with agent(max_new_tokens=2, max_turns=100) as driven:
        messages = HELLO
        for _ in range(4):
            driven.model.script.append("one two three four five")
            messages = then(await driven.say(messages), "shorter", messages)
        assert (await refused(driven, messages)).code == "context_length_exceeded"
        session = await driven.session.close()
    assert (session.stop, session.truncated_turns, len(session.segments)) == (Stop.LENGTH, 4, 1)


async def test_a_last_turn_cut_short_is_a_length_stop() -> None:
    with agent(max_new_tokens=2) as driven:
        driven.model.script.append("one two three")
        await driven.ask(HELLO)
        session = await driven.session.close()
    assert session.stop is Stop.LENGTH


async def test_a_truncated_turn_that_the_agent_drops_starts_a_segment() -> None:
    with agent(max_new_tokens=2) as driven:
        driven.model.script.extend(["one two three", "x"])
        first = await driven.say(HELLO)
        await driven.ask(then(first))
        await driven.ask([*HELLO, {"role": "user", "content": "try again"}])
        session = await driven.session.close()
    assert [s.fork_reason for s in session.segments] == [None, "new_conversation"]
    check_truth(session, driven.model.samples)


async def test_a_retry_gets_the_same_answer_also_while_the_first_is_running() -> None:
    with agent() as driven:
        driven.engine.gate = asyncio.Event()
        calls = [asyncio.create_task(driven.ask(HELLO, stream=bool(i % 2), user=str(i))) for i in range(5)]
        await asyncio.sleep(0.05)
        driven.engine.gate.set()
        answers = await asyncio.gather(*calls)
        assert all(answer == answers[0] for answer in answers)
        assert driven.model.num_requests == 1
        session = await driven.session.close()
    assert (len(session.turns), session.retries_deduplicated) == (1, 4)


async def test_another_seed_is_another_request() -> None:
    with agent() as driven:
        assert (await driven.ask(HELLO, seed=1))["id"] != (await driven.ask(HELLO, seed=2))["id"]
        session = await driven.session.close()
    assert [s.fork_reason for s in session.segments] == [None, "new_conversation"]


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        (Fault("status", 500), 502, "engine_status_500"),
        (Fault("status", 400), 502, "engine_status_400"),
        (Fault("refused"), 503, "engine_refused"),
        (Fault("hang"), 504, "engine_timeout"),
        (Fault("drop", field="meta_info.output_token_logprobs"), 502, "engine_reply"),
        (Fault("drop", field="meta_info.weight_version"), 502, "engine_reply"),
        (Fault("drop", field="output_ids"), 502, "engine_reply"),
    ],
)
async def test_an_engine_failure_is_infrastructure_unless_it_recovers(fault: Fault, status: int, cause: str) -> None:
    with agent(timeout_s=0.5) as driven:
        driven.model.faults.extend([fault] * (2 if fault.kind == "refused" else 1))
        error = await refused(driven, HELLO)
        assert (error.status, error.code) == (status, cause)
        broken = driven.session._record()
        assert (broken.stop, broken.cause) == (Stop.INFRASTRUCTURE, cause)
        await driven.ask(HELLO)
        session = await driven.session.close()
    assert (session.stop, session.cause, len(session.turns)) == (None, None, 1)


async def test_a_failure_that_nothing_followed_stays() -> None:
    with agent() as driven:
        first = await driven.say(HELLO)
        driven.model.faults.extend([Fault("status", 500)] * 9)
        for _ in range(9):
            await refused(driven, then(first))
        session = await driven.session.close()
    assert (session.stop, session.cause) == (Stop.INFRASTRUCTURE, "engine_status_500")
    assert (len(session.turns), session.retries_deduplicated) == (1, 0)


async def test_a_retry_after_a_failure_samples_with_the_same_seed() -> None:
    with agent() as driven, agent() as smooth:
        driven.model.faults.append(Fault("status", 500))
        await refused(driven, HELLO)
        assert await driven.say(HELLO) == await smooth.say(HELLO)


async def test_an_answer_nobody_read_is_not_trained_on() -> None:
    with agent() as driven:
        first = await driven.say(HELLO)
        driven.engine.gate = asyncio.Event()
        hung_up = asyncio.create_task(driven.ask(then(first)))
        await asyncio.sleep(0.05)
        hung_up.cancel()
        driven.engine.gate.set()
        await asyncio.sleep(0.05)
        assert driven.model.num_requests == 2
        session = await driven.session.close()
    assert len(session.turns) == 1
    check_truth(session, driven.model.samples[:1])


async def test_a_client_that_hangs_up_and_asks_again_finds_its_answer() -> None:
    with agent() as driven:
        driven.engine.gate = asyncio.Event()
        hung_up = asyncio.create_task(driven.ask(HELLO))
        await asyncio.sleep(0.05)
        hung_up.cancel()
        again = asyncio.create_task(driven.ask(HELLO))
        await asyncio.sleep(0.05)
        driven.engine.gate.set()
        await again
        session = await driven.session.close()
    assert (driven.model.num_requests, len(session.turns), session.retries_deduplicated) == (1, 1, 1)


async def test_a_client_that_gave_up_on_the_engine_is_remembered() -> None:
    with agent() as driven:
        first = await driven.say(HELLO)
        driven.engine.gate = asyncio.Event()
        hung_up = asyncio.create_task(driven.ask(then(first)))
        await asyncio.sleep(0.05)
        hung_up.cancel()
        await asyncio.sleep(0)
        assert (await driven.session.close()).unanswered
    with agent() as driven:
        await driven.say(HELLO)
        assert not (await driven.session.close()).unanswered


async def test_a_call_that_another_one_overtook_is_no_wait_for_the_engine() -> None:
    with agent() as driven:
        driven.engine.gate = asyncio.Event()
        slow = asyncio.create_task(driven.ask(HELLO))
        await asyncio.sleep(0.05)
        driven.engine.gate = None
        await driven.ask([{"role": "user", "content": "another"}])
        slow.cancel()
        await asyncio.sleep(0)
        assert not (await driven.session.close()).unanswered


async def test_a_client_that_hangs_up_and_moves_on_leaves_no_fork() -> None:
    with agent(max_turns=2) as driven:
        first = await driven.say(HELLO)
        driven.engine.gate = asyncio.Event()
        hung_up = asyncio.create_task(driven.ask(then(first, "a")))
        await asyncio.sleep(0.05)
        hung_up.cancel()
        await asyncio.sleep(0)
        moved_on = asyncio.create_task(driven.ask(then(first, "b")))
        await asyncio.sleep(0.05)
        driven.engine.gate.set()
        await moved_on
        session = await driven.session.close()
    assert [s.fork_reason for s in session.segments] == [None]
    assert len(session.turns) == 2
    check_truth(session, driven.model.samples)


async def test_two_calls_at_once_are_two_segments() -> None:
    with agent() as driven:
        first = await driven.say(HELLO)
        driven.engine.gate = asyncio.Event()
        calls = [asyncio.create_task(driven.ask(then(first, text))) for text in "ab"]
        await asyncio.sleep(0.05)
        driven.engine.gate.set()
        await asyncio.gather(*calls)
        session = await driven.session.close()
    assert [s.fork_reason for s in session.segments] == [None, "concurrent_request"]
    assert session.segments[1].parent == 0
    check_truth(session, driven.model.samples)


async def test_closing_ends_what_is_open() -> None:
    with agent() as driven:
        driven.engine.gate = asyncio.Event()
        waiting = asyncio.create_task(driven.ask(HELLO))
        await asyncio.sleep(0.2)
        session = await driven.session.close()
        with pytest.raises(RequestError) as caught:
            await waiting
        assert caught.value.status == 404
        assert (await refused(driven, HELLO)).status == 404
        await asyncio.sleep(0)
        assert driven.model.aborted == ["a0.t0.0.0"]
    assert (session.segments, session.turns, session.stop) == ((), (), None)
    assert session.engine_wait_s >= 0.04


async def test_engine_wait_counts_overlapping_calls_once() -> None:
    with agent() as driven:
        driven.model.delay_s = 0.5
        await asyncio.gather(*(driven.ask([{"role": "user", "content": str(i)}]) for i in range(4)))
        session = await driven.session.close()
    assert 0.5 <= session.engine_wait_s < 1.5  # one after the other: 2 s
    assert all(turn.engine_wait_s >= 0.5 for turn in session.turns)


async def test_sampling_long_answers_is_told_apart_from_waiting() -> None:
    """Eight quick ones tell the pace; then 40 tokens at that pace, and 40 that waited ten times as long."""
    text = "solve the task " * 5
    with agent(max_turns=20, max_new_tokens=200) as driven:
        driven.model.script.extend([text] * 10)
        driven.model.token_s = 0.02
        for i in range(9):
            await driven.ask([{"role": "user", "content": str(i)}])
        paced = driven.session._sampling_s
        num_tokens = len(driven.model.samples[0].ids)
        assert num_tokens >= 16
        driven.model.delay_s = 4.0
        await driven.ask([{"role": "user", "content": "9"}])
        session = await driven.session.close()
    one = num_tokens * 0.02
    assert 2 * one <= paced < 3 * one  # the eighth and the ninth
    assert 3 * one <= session.sampling_s < 4.5 * one
    assert session.engine_wait_s >= 4.0 + 10 * one


async def test_a_template_that_refuses_is_the_agents_error() -> None:
    with agent("strict_roles") as driven:
        error = await refused(driven, [*HELLO, {"role": "tool", "content": "x"}])
        assert (error.status, error.code) == (400, "template_refused")
        session = await driven.session.close()
    assert session.stop is None


async def test_a_bug_of_ours_is_infrastructure() -> None:
    with agent() as driven:
        driven.session._tokens.plan = None  # type: ignore[assignment, method-assign]
        assert (await refused(driven, HELLO)).status == 500
        session = await driven.session.close()
    assert (session.stop, session.cause) == (Stop.INFRASTRUCTURE, "proxy_error")


DEEP_CALL = '<tool_call>{"name":"bash","arguments":' + "[" * 1500 + "</tool_call>"
SURROGATES = [
    (r'<tool_call>{"name": "bash", "arguments": {"command": "a\ud800b"}}</tool_call>', {"command": "a?b"}),
    (r'<tool_call>{"name": "bash", "arguments": {"\udc00": 1}}</tool_call>', {"?": 1}),
    (r'<tool_call>{"name": "bash", "arguments": "{\"command\": \"\\udfff\"}"}</tool_call>', {"command": "?"}),
    (r'<tool_call>{"name": "bash", "arguments": {"command": "\ud83d\ude00"}}</tool_call>', {"command": "\U0001f600"}),
]


async def test_arguments_nested_out_of_reason_are_content() -> None:
    with agent(max_new_tokens=4000) as driven:
        driven.model.script.extend([DEEP_CALL, "ok"])
        said = await driven.say(HELLO, tools=TOOLS)
        assert said == {"role": "assistant", "content": DEEP_CALL}
        await driven.say(then(said), tools=TOOLS)
        session = await driven.session.close()
    assert (session.stop, session.cause, len(session.segments)) == (None, None, 1)


@pytest.mark.parametrize(("text", "expected"), SURROGATES)
async def test_a_lone_surrogate_is_stored_as_it_is_sent(text: str, expected: dict[str, Any]) -> None:
    with agent(max_new_tokens=400) as driven:
        driven.model.script.extend([text, "ok"])
        payload = await driven.ask(HELLO, tools=TOOLS)
        sent = json.loads(json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace"))["choices"][0]["message"]
        function = sent["tool_calls"][0]["function"]
        assert json.loads(function["arguments"]) == expected
        function["arguments"] = json.dumps(expected, ensure_ascii=False)
        await driven.say(then(sent), tools=TOOLS)
        session = await driven.session.close()
    assert [segment.fork_reason for segment in session.segments] == [None]


async def test_an_answer_with_everything_asked_for() -> None:
    with agent("strips_thinking") as driven:
        driven.model.script.append(f"<think>\nwhy\n</think>\n\nlook\n{CALL}")
        payload = await driven.ask(HELLO, tools=TOOLS, logprobs=True, return_token_ids=True)
        (sample,) = driven.model.samples
        choice = payload["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("look", "why")
        assert [c["logprob"] for c in choice["logprobs"]["content"]] == list(sample.logprobs)
        assert choice["token_ids"] == list(sample.ids)
        assert payload["prompt_token_ids"] == list(sample.prompt)
        assert payload["usage"]["prompt_tokens"] == len(sample.prompt)
        assert payload["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert payload["rl360"]["engine"][0]["meta_info"]["something_new"] == "kept"
        session = await driven.session.close()
    (turn,) = session.turns
    assert turn.request_messages == tuple(HELLO)
    assert turn.response_message == choice["message"]
    call_ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in call_ids)


async def test_what_the_agent_asks_for_does_not_change_sampling() -> None:
    with agent(temperature=0.8, max_new_tokens=30) as driven:
        await driven.ask(HELLO, temperature=0, max_tokens=1, top_p=0.1, stop=["e"], max_completion_tokens=1)
        params = driven.model.samples[0].params
    assert (params["temperature"], params["max_new_tokens"], params["top_p"]) == (0.8, 30, 1.0)
    assert "stop" not in params
