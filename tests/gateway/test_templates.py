"""What is new, rendered apart, is what the whole rendering would have had in that place."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from rl360.errors import ConfigError
from rl360.gateway.templates import CannotExtend, ChatTemplate, TemplateRefused
from rl360.gateway.tokenizer import TextTokenizer
from tests.gateway.kit import END_OF_TURN, TOOLS, tokenizer_of, write_folder
from tests.gateway.kit_session import template_of

NOON = datetime(2026, 3, 4, 12)
FIRST = [{"role": "user", "content": "hello"}]
CALL = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
SAID = {"role": "assistant", "content": "solve it"}
CALLED = {"role": "assistant", "content": "solve it", "tool_calls": [CALL]}
NEXT = {"role": "user", "content": "print the answer"}
RESULT = {"role": "tool", "content": "exit=0", "tool_call_id": "c0", "name": "bash"}


def extend(name: str, said: dict[str, Any], new: list[dict[str, Any]], ended: bool = True, **kwargs: Any) -> str:
    """Text of the ids that follow the policy's turn."""
    template, tokenizer = template_of(name), tokenizer_of(name)
    start = template.start(FIRST, TOOLS, kwargs, NOON)
    last = tokenizer.id_of(END_OF_TURN[name]) if ended else tokenizer.encode("it")[-1]
    assert last is not None
    rendering = template.extend([*FIRST, said, *new], [1], [start.boundary], last, TOOLS, kwargs, NOON)
    return tokenizer.decode(rendering.token_ids)


@pytest.mark.parametrize("name", [n for n in END_OF_TURN if n != "strict_roles"])
@pytest.mark.parametrize(("said", "new"), [(SAID, [NEXT]), (CALLED, [RESULT]), (CALLED, [RESULT, RESULT, NEXT])])
def test_the_tail_is_what_the_whole_rendering_has(name: str, said: dict[str, Any], new: list[dict[str, Any]]) -> None:
    whole = template_of(name).render([*FIRST, said, *new], TOOLS, {}, NOON)
    after = whole.split("solve it")[1]
    end = END_OF_TURN[name]
    assert extend(name, said, new) == after[after.index(end) + len(end) :]
    plain = template_of(name).render([*FIRST, SAID, *new], TOOLS, {}, NOON).split("solve it")[1]
    assert extend(name, said, new, ended=False) == plain


def test_a_template_that_refuses_results_without_calls_keeps_the_calls() -> None:
    assert extend("strict_roles", CALLED, [RESULT]) == "[RESULT]exit=0[/RESULT]"
    assert extend("strict_roles", CALLED, [RESULT], ended=False) == "</s>[RESULT]exit=0[/RESULT]"
    assert extend("strict_roles", SAID, [NEXT]) == "[INST]print the answer[/INST]"


def test_the_first_prompt_is_the_whole_rendering() -> None:
    start = template_of("default_system").start(FIRST, (), {}, NOON)
    expected = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    expected += "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer_of("default_system").decode(start.token_ids) == expected
    assert start.generation_prompt == "<|im_start|>assistant\n"
    assert start.boundary.length == len(expected) - len(start.generation_prompt)


def test_past_thinking_may_vanish_without_a_new_segment() -> None:
    said = {**SAID, "reasoning_content": "why"}
    assert extend("strips_thinking", said, [NEXT]) == extend("strips_thinking", SAID, [NEXT])


def test_template_arguments_reach_the_generation_prompt() -> None:
    text = extend("strips_thinking", SAID, [NEXT], no_thinking=True)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_clock_of_the_session_stays_where_it_was() -> None:
    template = template_of("dated")
    start = template.start(FIRST, (), {}, NOON)
    last = tokenizer_of("dated").id_of("<|eot|>")
    assert last is not None
    assert "04 Mar 2026 12:00:00" in tokenizer_of("dated").decode(start.token_ids)
    noon = template.extend([*FIRST, SAID, NEXT], [1], [start.boundary], last, (), {}, NOON)
    # Another date is another text of what is in the sequence already; what is new is the same.
    later = template.extend([*FIRST, SAID, NEXT], [1], [start.boundary], last, (), {}, datetime(2026, 3, 5))
    assert later == noon


SHOWN = "[TOOLS]" + json.dumps(TOOLS) + "[/TOOLS]"


def test_a_template_that_moves_the_tools_appends_them_again() -> None:
    """The tools in front of the first question stay where the policy saw them; the new question has them too."""
    whole = template_of("moving_tools").render([*FIRST, SAID, NEXT], TOOLS, {}, NOON)
    assert whole == f"<|begin|>[INST]hello[/INST]solve it</s>{SHOWN}[INST]print the answer[/INST]"
    assert extend("moving_tools", SAID, [NEXT]) == f"{SHOWN}[INST]print the answer[/INST]"
    assert extend("moving_tools", SAID, [NEXT], ended=False) == f"</s>{SHOWN}[INST]print the answer[/INST]"
    assert extend("moving_tools", SAID, [RESULT]) == "[RESULT]exit=0[/RESULT]"


def chat_of(template: ChatTemplate, turns: list[list[dict[str, Any]]]) -> list[str]:
    """What each request after the first appends, as text. The policy says A, B, C ... and ends its turns."""
    messages: list[dict[str, Any]] = []
    sampled: list[int] = []
    boundaries: list[Any] = []
    texts = []
    last = template.tokenizer.id_of("</s>")
    assert last is not None
    for number, new in enumerate(turns):
        messages += new
        rendering = (
            template.extend(messages, sampled, boundaries, last, (), {})
            if sampled
            else template.start(messages, (), {})
        )
        texts.append(template.tokenizer.decode(rendering.token_ids))
        boundaries.append(rendering.boundary)
        sampled.append(len(messages))
        messages.append({"role": "assistant", "content": chr(ord("A") + number)})
    return texts[1:]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TURN = "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
EACH = "{% for m in messages %}" + TURN + "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }} messages" + EACH,  # counts what came before
        "first: {{ messages[0].content }}, newest: {{ messages[-1].content }}" + EACH,  # repeats what is new in front
        "{% for m in messages[-4:] %}" + TURN + "{% endfor %}",  # shows the newest four
    ],
)
def test_a_template_that_rewrites_what_was_may_still_show_what_is_new_last(source: str) -> None:
    turns = [[user("a")], [user("b")], [user("c"), user("d")], [user("e")]]
    expected = ["[INST]b[/INST]", "[INST]c[/INST][INST]d[/INST]", "[INST]e[/INST]"]
    assert chat_of(make(source), turns) == expected


def test_a_template_that_shows_the_policys_words_twice_cannot_extend() -> None:
    source = "{% for m in messages if m.role == 'assistant' %}{{ m.content }};{% endfor %}" + EACH
    with pytest.raises(CannotExtend, match="template_hides_history"):
        chat_of(make(source), [[user("a")], [user("b")]])


def test_a_template_that_puts_new_words_in_front_cannot_extend() -> None:
    """The new system message stands before the policy's turn; behind it there is only half of what is new."""
    source = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}"
    )
    assert chat_of(make(source), [[user("a")], [user("b")]]) == ["[INST]b[/INST]"]
    with pytest.raises(CannotExtend, match="template_moves_new_messages"):
        chat_of(make(source), [[user("a")], [{"role": "system", "content": "a new rule"}, user("b")]])


def test_a_template_that_puts_new_words_right_before_the_policys_turn_cannot_extend() -> None:
    """All that was rendered before is still there, and the policy would never see the new rule."""
    source = (
        "{% set ns = namespace(shown=false) %}{% for m in messages if m.role != 'system' %}"
        "{% if m.role == 'assistant' and not ns.shown %}{% set ns.shown = true %}"
        "{% for s in messages if s.role == 'system' %}[SYS]{{ s.content }}[/SYS]{% endfor %}{% endif %}"
        + TURN
        + "{% endfor %}"
    )
    assert chat_of(make(source), [[user("a")], [user("b")]]) == ["[INST]b[/INST]"]
    with pytest.raises(CannotExtend, match="template_moves_new_messages"):
        chat_of(make(source), [[user("a")], [{"role": "system", "content": "a new rule"}, user("b")]])


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(TemplateRefused, match="a tool result without a call"):
        template_of("strict_roles").render([*FIRST, RESULT], (), {})


def make(source: str, backend: Tokenizer | None = None) -> ChatTemplate:
    tokenizer = tokenizer_of()
    if backend is not None:
        tokenizer = TextTokenizer(backend, {}, frozenset([backend.token_to_id("</s>")]), source)
    else:
        tokenizer.template = source
    return ChatTemplate(tokenizer)


def test_generation_blocks_and_filters_are_known() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
    assert make(source).render([{"role": "user", "content": "<é>"}], (), {}) == '"<é>"'


def test_a_template_that_drops_old_turns_says_so() -> None:
    template = make("{{ messages[-1].content }}")
    with pytest.raises(CannotExtend, match="template_hides_history"):
        template.extend([*FIRST, SAID, NEXT], [1], [template.start(FIRST, (), {}).boundary], 3, (), {})


def test_a_tokenizer_with_a_prefix_space_gets_none_in_the_middle() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4, "b": 5}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    template = make(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}", backend
    )
    start = template.start([{"role": "user", "content": "a"}], (), {})
    assert start.token_ids == [4]
    messages = [{"role": "user", "content": "a"}, SAID, {"role": "user", "content": "ab"}]
    after = template.extend(messages, [1], [start.boundary], 1, (), {})
    assert after.token_ids == [3, 5]
    assert template.extend(messages, [1], [start.boundary], 5, (), {}).token_ids == [1, 3, 5]


def test_a_folder_is_read_and_its_gaps_are_named(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_folder(tmp_path / "good"))
    assert tokenizer.special_names == {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
    assert {tokenizer.added[i] for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    with pytest.raises(ConfigError) as caught:
        TextTokenizer.from_folder(tmp_path)
    assert len(caught.value.problems) == 2
    (tmp_path / "good" / "chat_template.jinja").write_text("{{ messages }}")
    assert TextTokenizer.from_folder(tmp_path / "good").template == "{{ messages }}"


def test_a_turns_text_is_without_its_end_and_survives_odd_input() -> None:
    tokenizer = tokenizer_of()
    end = tokenizer.id_of("<|im_end|>")
    assert end is not None
    ids = [*tokenizer.encode("<think>hi</think>"), end]
    assert tokenizer.decode_turn(ids) == "<think>hi</think>"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert tokenizer.encode_after("", end) == []


def test_encoding_a_long_text_lets_other_threads_run() -> None:
    tokenizer = tokenizer_of()
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(tokenizer.encode, "def solve(x): return x + 1\n" * 20_000)
        turns = 0
        while not encoding.done():
            time.sleep(0.001)
            turns += 1
        assert len(encoding.result()) == 200_000
    assert turns > 20


@pytest.mark.model
def test_smollm2_tail(smollm2_dir: Path) -> None:
    tokenizer = TextTokenizer.from_folder(smollm2_dir)
    assert tokenizer.eos_ids == {2}
    template = ChatTemplate(tokenizer)
    start = template.start(FIRST, (), {}, NOON)
    rendering = template.extend([*FIRST, SAID, NEXT], [1], [start.boundary], 2, (), {}, NOON)
    whole = template.start([*FIRST, SAID, NEXT], (), {}, NOON).token_ids
    assert whole[: len(start.token_ids)] == start.token_ids
    assert whole[-len(rendering.token_ids) :] == rendering.token_ids
    assert whole == [*start.token_ids, *tokenizer.encode("solve it"), 2, *rendering.token_ids]
