"""Reasoning and tool calls out of text; nothing that was written is lost."""

from __future__ import annotations

import pytest

from rl360.errors import ConfigError
from rl360.gateway.parsers import ParsedCall, make_parser
from rl360.gateway.parsers.hermes import HermesTools
from rl360.gateway.parsers.qwen3 import Qwen3Reasoning

LS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'
LS_CALL = ParsedCall("bash", '{"command": "ls é"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call ", "no call ", ()),
        (LS, "", (LS_CALL,)),
        (f"first\n{LS}\n{LS}", "first", (LS_CALL, LS_CALL)),
        ("<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", ()),
        (f"<tool_call>[]</tool_call>{LS}", "<tool_call>[]</tool_call>", (LS_CALL,)),
        (LS.removesuffix("</tool_call>"), LS.removesuffix("</tool_call>"), ()),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", (ParsedCall("f", "{}"),)),
        ('<tool_call>{"name": "f"}</tool_call>', "", (ParsedCall("f", "{}"),)),
    ],
)
def test_hermes(text: str, content: str, calls: tuple[ParsedCall, ...]) -> None:
    assert HermesTools().parse(text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("answer", "assistant\n", (None, "answer")),
        ("<think>\nwhy\n</think>\n\nanswer", "assistant\n", ("why", "answer")),
        ("why\n</think>\n\nanswer", "assistant\n<think>\n", ("why", "answer")),
        ("why, cut", "assistant\n<think>\n", ("why, cut", "")),
        ("<think>\nwhy, cut", "assistant\n", ("why, cut", "")),
        ("answer", "assistant\n<think>\n\n</think>\n\n", (None, "answer")),
        ("says <think> later</think>", "assistant\n", (None, "says <think> later</think>")),
    ],
)
def test_qwen3(text: str, prompt: str, expected: tuple[str | None, str]) -> None:
    assert Qwen3Reasoning().split(text, prompt) == expected


def test_calls_are_looked_for_after_the_reasoning_and_only_when_tools_were_offered() -> None:
    parser = make_parser("hermes", "qwen3")
    turn = parser.parse(f"<think>\n{LS}\n</think>\n\n{LS}", "", with_tools=True)
    assert (turn.reasoning, turn.content, turn.calls) == (LS, "", (LS_CALL,))
    assert parser.parse(LS, "", with_tools=False).content == LS


def test_an_unknown_parser_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        make_parser("hermes2", "qwen")
    assert len(caught.value.problems) == 2
    assert "did you mean hermes?" in caught.value.problems[0]
    assert "expected one of none, qwen3" in caught.value.problems[1]
