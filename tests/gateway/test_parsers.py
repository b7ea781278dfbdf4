"""Reasoning and tool calls out of text; nothing that was written is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rl360.errors import ConfigError
from rl360.gateway.parsers import ParsedCall, ParsedTurn, TurnParser, make_parser
from rl360.gateway.parsers.base import MAX_CALLS
from rl360.gateway.parsers.hermes import HermesTools
from rl360.gateway.parsers.k2_horizon import K2HorizonReasoning, K2HorizonTools
from rl360.gateway.parsers.qwen3 import Qwen3Reasoning
from tests.gateway.kit import TOOLS

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


def k2_call(name: str, **arguments: str) -> str:
    pairs = "".join(
        f"<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_value>{v}</ifm|arg_value>\n" for k, v in arguments.items()
    )
    return f"<ifm|tool_call>{name}\n{pairs}</ifm|tool_call>"


K2_LS = k2_call("bash", command="ls é\n<b> 'x'")
K2_LS_CALL = ParsedCall("bash", json.dumps({"command": "ls é\n<b> 'x'"}, ensure_ascii=False))
K2_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer"},
                "flag": {"type": ["boolean", "null"]},
                "text": {"type": "string"},
                "list": {"type": "array"},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call ", "no call ", ()),
        (f"<ifm|tool_calls>\n{K2_LS}\n</ifm|tool_calls>", "", (K2_LS_CALL,)),
        (f"first\n<ifm|tool_calls>\n{K2_LS}\n{K2_LS}\n</ifm|tool_calls>", "first", (K2_LS_CALL, K2_LS_CALL)),
        (K2_LS, "", (K2_LS_CALL,)),  # without the group
        (f"<ifm|tool_calls>{K2_LS}", "<ifm|tool_calls>", (K2_LS_CALL,)),  # the turn was cut after the call
        ("<ifm|tool_calls><ifm|tool_call>bash\n<ifm|arg_key>command", None, ()),
        ("<ifm|tool_call>bash\nls -la</ifm|tool_call>", None, ()),
        ("<ifm|tool_call></ifm|tool_call>", None, ()),
        ('<ifm|tool_call>{"name": "f", "arguments": {"n": 1}}</ifm|tool_call>', "", (ParsedCall("f", '{"n": 1}'),)),
        ("<ifm|tool_call>{bad}</ifm|tool_call>", None, ()),
        (k2_call("now"), "", (ParsedCall("now", "{}"),)),
        (
            k2_call("f", n="3", flag="true", text="3", list='["a"]', other="3"),
            "",
            (ParsedCall("f", '{"n": 3, "flag": true, "text": "3", "list": ["a"], "other": "3"}'),),
        ),
        (k2_call("f", n="three"), "", (ParsedCall("f", '{"n": "three"}'),)),
        (
            "<ifm|tool_call>g\n<ifm|arg_key>n</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>"
            "<ifm|arg_value>3</ifm|arg_value></ifm|tool_call>",
            "",
            (ParsedCall("g", '{"n": 3}'),),
        ),
    ],
)
def test_k2_horizon_calls(text: str, content: str | None, calls: tuple[ParsedCall, ...]) -> None:
    """Content None: all of the text, because no call could be read."""
    assert K2HorizonTools().parse(text, (*TOOLS, K2_TOOL)) == (text if content is None else content, calls)


@pytest.mark.parametrize("tag", ["think", "think_fast", "think_faster"])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("answer", False, (None, "answer")),
        ("why\n</TAG>\nanswer", True, ("why", "answer")),
        ("</TAG>answer", True, ("", "answer")),
        ("why, cut", True, ("why, cut", "")),
        ("<TAG>\nwhy</TAG>answer", False, ("why", "answer")),
        ("<TAG>\nwhy</TAG>answer", True, ("why", "answer")),
        ("why\n<ifm|tool_calls>x", True, ("why", "<ifm|tool_calls>x")),
        ("why</TAG>\n<ifm|tool_calls>x</TAG>", True, ("why", "<ifm|tool_calls>x</TAG>")),
        ("says <TAG> later</TAG>", False, (None, "says <TAG> later</TAG>")),
    ],
)
def test_k2_horizon_reasoning(tag: str, text: str, inside: bool, expected: tuple[str | None, str]) -> None:
    def with_tag(words: str) -> str:
        return words.replace("TAG", f"ifm|{tag}")

    prompt = "<|ifm|im_start|>assistant\n" + with_tag("<TAG>\n" if inside else "")
    reasoning, rest = expected
    assert K2HorizonReasoning().split(with_tag(text), prompt) == (reasoning, with_tag(rest))


def test_calls_are_looked_for_after_the_reasoning_and_only_when_tools_were_offered() -> None:
    parser = make_parser("hermes", "qwen3")
    turn = parser.parse(f"<think>\n{LS}\n</think>\n\n{LS}", "", TOOLS)
    assert (turn.reasoning, turn.content, turn.calls) == (LS, "", (LS_CALL,))
    assert parser.parse(LS, "", ()).content == LS


def test_an_unknown_parser_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        make_parser("hermes2", "qwen")
    assert len(caught.value.problems) == 2
    assert "did you mean hermes?" in caught.value.problems[0]
    assert "expected one of none, qwen3, k2_horizon" in caught.value.problems[1]


DEEP = ['{"name": "bash", "arguments":' + "[" * 1500]
DEEP += [f'{{"name": "bash", "arguments": {"[" * n}{"]" * n}}}' for n in (101, 1000, 100_000)]
DEEP += [f'{{"name": "bash", "arguments": "{"[" * n}{"]" * n}"}}' for n in (102, 100_000)]


@pytest.mark.parametrize("body", DEEP, ids=range(len(DEEP)))
def test_a_call_nested_out_of_reason_is_a_malformed_one(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert HermesTools().parse(text) == (text, ())
    text = f"<ifm|tool_call>{body}</ifm|tool_call>"
    assert K2HorizonTools().parse(text) == (text, ())


def test_a_k2_value_nested_out_of_reason_is_text() -> None:
    value = "[" * 1500
    _, (call,) = K2HorizonTools().parse(k2_call("f", list=value), [K2_TOOL])
    assert json.loads(call.arguments) == {"list": value}


def test_nesting_within_reason_is_read() -> None:
    arguments = '{"a": ' + "[" * 90 + "]" * 90 + "}"
    _, (call,) = HermesTools().parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert call.arguments == arguments


class Fails:
    def split(self, text: str, generation_prompt: str) -> tuple[str | None, str]:
        raise KeyError(text)

    def parse(self, text: str, tools: Any) -> tuple[str, tuple[ParsedCall, ...]]:
        raise KeyError(text)


def test_a_parser_that_fails_leaves_the_text_as_content() -> None:
    assert TurnParser(Fails(), HermesTools()).parse(f"a{LS}", "", TOOLS) == ParsedTurn("a", None, (LS_CALL,))
    assert TurnParser(Qwen3Reasoning(), Fails()).parse(f"<think>b</think>{LS}", "", TOOLS) == ParsedTurn(LS, "b", ())


def test_the_calls_of_a_reply_are_bounded() -> None:
    content, calls = HermesTools().parse(LS * (MAX_CALLS + 2))
    assert (content, calls) == (LS * 2, (LS_CALL,) * MAX_CALLS)
    one = k2_call("now")
    assert K2HorizonTools().parse(one * (MAX_CALLS + 1)) == (one, (ParsedCall("now", "{}"),) * MAX_CALLS)


PAIR = "<ifm|arg_key>k</ifm|arg_key>"
HOSTILE = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>{",
    "</tool_call>",
    "<ifm|tool_call>",
    "<ifm|tool_call>f</ifm|tool_call><ifm|tool_calls>",
    "<ifm|tool_calls> ",
    "<ifm|think>",
    "<think>",
    "</think",
    PAIR,
    "<ifm|arg_value>",
    " ",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("around", ["", "<ifm|tool_call>f X</ifm|tool_call>"])
def test_parsers_are_linear(piece: str, around: str) -> None:
    """Eight times the text in well under the 64 times that a quadratic parser takes."""

    def seconds(repeats: int) -> float:
        text = around.replace("X", piece * repeats) or piece * repeats
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            for tools in ("hermes", "k2_horizon"):
                for reasoning, prompt in (("qwen3", "<think>"), ("k2_horizon", "<ifm|think>"), ("none", "")):
                    make_parser(tools, reasoning).parse(text, prompt, TOOLS)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(16_000) < 24 * max(seconds(2000), 0.0005)


K2_SCHEMAS = {
    "$defs": {"Name": {"type": "string"}, "Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "type": "object",
    "properties": {
        "named": {"$ref": "#/$defs/Name"},
        "counted": {"$ref": "#/$defs/Count"},
        "loop": {"$ref": "#/$defs/Loop"},
        "elsewhere": {"$ref": "https://example.org/schema"},
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"oneOf": [{"$ref": "#/$defs/Name"}, {"type": "integer"}]},
        "level": {"enum": [1, 2, 3]},
        "mode": {"enum": ["1", "2"]},
        "fixed": {"const": 7},
        "odd": True,
    },
}


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("named", "12", "12"),
        ("counted", "12", 12),
        ("loop", "12", "12"),
        ("elsewhere", "12", "12"),
        ("optional", "12", 12),
        ("optional", "null", None),
        ("either", "12", "12"),
        ("level", "2", 2),
        ("mode", "2", "2"),
        ("fixed", "7", 7),
        ("odd", "12", "12"),
        ("unknown", "12", "12"),
    ],
)
def test_k2_values_follow_the_schema_through_references_and_alternatives(key: str, written: str, read: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": K2_SCHEMAS}}
    _, (call,) = K2HorizonTools().parse(k2_call("f", **{key: written}), [tool])
    assert json.loads(call.arguments) == {key: read}


def test_a_written_type_wins_over_the_schema() -> None:
    """The template's typed form, which says of an alternative what it is."""
    tool = {"type": "function", "function": {"name": "f", "parameters": K2_SCHEMAS}}
    text = k2_call("f", either="12").replace("<ifm|arg_value>", "<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>")
    _, (call,) = K2HorizonTools().parse(text, [tool])
    assert json.loads(call.arguments) == {"either": 12}
