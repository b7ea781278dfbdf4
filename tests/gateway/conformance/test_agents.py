"""Every bundled agent on every bundled template: turns seen = turns kept, trained ids = sampled ids, no forks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl360.agents.bash import BashAgent
from rl360.agents.bash_text import BashTextAgent
from rl360.agents.harbor import HarborAgent
from rl360.agents.repair_text import RepairTextAgent
from rl360.agents.single_turn import SingleTurnAgent
from rl360.agents.terminus_2 import Terminus2Agent
from rl360.types import Stop
from tests.agents.test_terminus_2 import DONE, act
from tests.gateway.conformance.conformance_kit import (
    TEMPLATES,
    Meeting,
    call,
    malformed,
    meeting,
    thought,
)
from tests.gateway.test_random_chats import check_truth

AGENTS = (SingleTurnAgent, BashAgent, BashTextAgent, RepairTextAgent, Terminus2Agent)
INSTRUCTION = "Write a Python function `double(x)` that returns twice x. 日本語"


def block(code: str, language: str = "bash") -> str:
    return f"```{language}\n{code}\n```"


def turns(agent: type, template: str) -> list[str]:
    """A whole attempt: several turns, some of them malformed, that ends by itself."""
    if agent is SingleTurnAgent:
        said = [block("x = 1", "python")]
    elif agent is BashAgent:
        said = [
            call(template, "bash", command="echo 'hi  é' >f; cat f"),
            f"both:\n{call(template, 'view', path='f', start_line=1)}\n"
            f"{call(template, 'edit', path='f', old_text='hi', new_text='ho')}",
            malformed(template),
            call(template, "python", code="1"),
            call(template, "bash", command="cat f; exit 3"),
            "no call at all",
            call(template, "submit"),
        ]
    elif agent is BashTextAgent:
        said = [f"look\n{block('ls')}", "hm", f"{block('echo 1')}\n{block('echo 2')}", block("submit")]
    elif agent is RepairTextAgent:
        said = [block("def double(x)", "python"), "hm", block("def double(x):\n    return 2 * x", "python")]
    else:
        said = [act("ls\n"), "hm", f"words\n{act('cat f')}", DONE, act("x\n"), DONE, DONE]
    return [thought(template, text) for text in said]


def check(met: Meeting, agent: type) -> None:
    """What holds of every attempt without an edited history."""
    assert met.error is None
    check_truth(met.session, met.samples)
    assert len(met.session.turns) == len(met.samples)
    if agent is not SingleTurnAgent:
        assert met.metadata["turns"] == len(met.samples)
    assert met.forks == []
    assert len(met.session.segments) == min(1, len(met.samples))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_a_whole_attempt(agent: type, template: str, tmp_path: Path) -> None:
    script = turns(agent, template)
    met = await meeting(agent, template, tmp_path, script, instruction=INSTRUCTION)
    check(met, agent)
    assert len(met.samples) == len(script)
    assert met.metadata["stop"] == "finished"
    assert met.session.stop is None
    if agent is BashAgent:
        assert met.environment is not None
        assert (met.environment.app / "f").read_text() == "ho  é\n"
        assert (met.metadata["format_failures"], met.metadata["format_ok"]) == (3, False)


@pytest.mark.model
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_on_smollm2s_own_template(agent: type, tmp_path: Path, smollm2_dir: Path) -> None:
    script = turns(agent, "smollm2")
    met = await meeting(agent, "smollm2", tmp_path, script, instruction=INSTRUCTION, checkpoint=smollm2_dir)
    check(met, agent)
    assert len(met.samples) == len(script)
    assert met.metadata["stop"] == "finished"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", AGENTS[1:], ids=lambda agent: agent.__name__)
async def test_a_turn_that_was_cut_and_what_follows(agent: type, template: str, tmp_path: Path) -> None:
    """A length stop, an answer to it, and on in the same segment."""
    script = turns(agent, template)
    met = await meeting(agent, template, tmp_path, ["x" * 500, *script], max_new_tokens=450, instruction=INSTRUCTION)
    check(met, agent)
    assert met.session.truncated_turns == 1
    assert (met.session.stop, met.metadata["stop"]) == (None, "finished")


@pytest.mark.parametrize("agent", AGENTS[1:], ids=lambda agent: agent.__name__)
async def test_turns_used_up(agent: type, tmp_path: Path) -> None:
    script = turns(agent, "chatml")[:2]
    met = await meeting(agent, "chatml", tmp_path, script, max_turns=2, instruction=INSTRUCTION)
    check(met, agent)
    assert (met.session.stop, met.metadata["stop"], len(met.samples)) == (Stop.TURNS, "turns", 2)


@pytest.mark.parametrize("agent", AGENTS[1:], ids=lambda agent: agent.__name__)
async def test_tokens_used_up(agent: type, tmp_path: Path) -> None:
    """The context ends within a turn, or leaves no room for one: never an error, and the verifier can run."""
    script = [text + " and so on" * 200 for text in turns(agent, "chatml")]
    met = await meeting(agent, "chatml", tmp_path, script, max_context_tokens=2500, instruction=INSTRUCTION)
    check(met, agent)
    assert met.session.stop is Stop.LENGTH
    assert sum(len(segment.token_ids_T) for segment in met.session.segments) <= 2500


@pytest.mark.parametrize("agent", AGENTS[1:], ids=lambda agent: agent.__name__)
async def test_nothing_but_cut_turns(agent: type, tmp_path: Path) -> None:
    met = await meeting(agent, "chatml", tmp_path, ["x" * 500] * 50, max_new_tokens=100)
    check(met, agent)
    assert 3 <= len(met.samples) <= 4
    assert met.session.stop is Stop.LENGTH


WORDS = [
    "",
    "no call",
    "a <|im_start|>user\nfake <think> tag",
    "naïve 日本語 \U0001f600",
    "```\n",
    "</think>",
    "\ud7ff ",
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    agent=st.sampled_from(AGENTS),
    template=st.sampled_from(TEMPLATES),
    picks=st.lists(st.integers(0, 99), max_size=8),
    max_new_tokens=st.sampled_from([40, 200, 4000]),
    max_turns=st.integers(1, 12),
    max_failures=st.integers(2, 9),
)
async def test_random_policies(
    agent: type, template: str, picks: list[int], max_new_tokens: int, max_turns: int, max_failures: int
) -> None:
    pool = [*turns(agent, template), *WORDS, *(text[: len(text) // 2] for text in turns(agent, template))]
    script = [pool[i % len(pool)] for i in picks]
    options: dict[str, Any] = {} if agent is SingleTurnAgent else {"max_failures": max_failures}
    with tempfile.TemporaryDirectory() as folder:
        met = await meeting(
            agent,
            template,
            Path(folder),
            script,
            max_new_tokens=max_new_tokens,
            max_turns=max_turns,
            options=options,
            instruction=INSTRUCTION,
        )
    check(met, agent)
    assert len(met.samples) <= max_turns
    assert met.session.stop is not Stop.INFRASTRUCTURE


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
async def test_harbors_own_terminus_2_through_litellm(template: str, tmp_path: Path) -> None:
    """Not our subclass: Harbor's agent by name, as any other would be used."""
    script = [text for text in turns(Terminus2Agent, template) if "hm" not in text]
    options = {
        "agent": "terminus-2",
        "options": {"max_turns": 10, "enable_summarize": False, "record_terminal_session": False},
    }
    met = await meeting(HarborAgent, template, tmp_path, script, options=options)
    assert met.error is None
    check_truth(met.session, met.samples)
    assert (len(met.session.turns), len(met.samples), met.forks) == (len(script), len(script), [])
    assert met.metadata["stop"] == "finished"


@pytest.mark.slow
async def test_harbors_own_terminus_2_ends_normally_at_a_cap(tmp_path: Path) -> None:
    options = {"agent": "terminus-2", "options": {"enable_summarize": False, "record_terminal_session": False}}
    met = await meeting(HarborAgent, "chatml", tmp_path, [act("ls\n")] * 3, options=options, max_turns=2)
    assert met.error is None
    assert (met.session.stop, met.metadata["stop"]) == (Stop.TURNS, "length")
