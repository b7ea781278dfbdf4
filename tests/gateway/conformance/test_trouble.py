"""What goes wrong between an agent and the engine, and agents that do what ours do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl360.agents.bash import BashAgent
from rl360.agents.bash_text import BashTextAgent
from rl360.agents.endpoint import Endpoint, Reply
from rl360.agents.repair_text import RepairTextAgent
from rl360.agents.terminus_2 import Terminus2Agent
from rl360.types import Stop
from tests.gateway.conformance.conformance_kit import IFM, TEMPLATES, call, meeting, thought
from tests.gateway.conformance.test_agents import INSTRUCTION, check, turns
from tests.gateway.stub_engine import Fault
from tests.gateway.test_random_chats import check_truth

AGENTS = (BashAgent, BashTextAgent, RepairTextAgent, Terminus2Agent)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl360.agents.endpoint._FIRST_PAUSE_S", 0.01)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_a_retry_after_a_500(agent: type, template: str, tmp_path: Path) -> None:
    """The agent's retry is the same turn: sampled once, kept once, and the attempt is sound."""
    faults = [Fault("status", 500)]
    met = await meeting(agent, template, tmp_path, turns(agent, template), faults=faults, instruction=INSTRUCTION)
    check(met, agent)
    assert (met.session.stop, met.session.cause, met.metadata["stop"]) == (None, None, "finished")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_replies_that_parsers_and_encoders_choke_on(agent: type, template: str, tmp_path: Path) -> None:
    """Calls nested out of reason and lone surrogates are the policy's mistakes: the attempt goes on."""
    opening, closing = "<tool_call>", "</tool_call>"
    if template == IFM:
        opening, closing = "<ifm|tool_calls><ifm|tool_call>", "</ifm|tool_call></ifm|tool_calls>"
    hostile = [
        f'{opening}{{"name":"bash","arguments":{"[" * 1500}{closing}',
        opening + r'{"name": "bash", "arguments": {"command": "echo \ud800"}}' + closing,
        opening + r'{"name": "ba\udc00sh", "arguments": {"\udfff": [1]}}' + closing,
    ]
    script = [piece for text in hostile for piece in (thought(template, text), turns(agent, template)[0])]
    met = await meeting(agent, template, tmp_path, [*script, *turns(agent, template)[1:]], instruction=INSTRUCTION)
    check(met, agent)
    assert (met.session.stop, met.session.cause) == (None, None)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_an_engine_that_stays_broken_is_infrastructure(agent: type, tmp_path: Path) -> None:
    met = await meeting(agent, "chatml", tmp_path, turns(agent, "chatml"), faults=[Fault("status", 500)] * 9)
    assert type(met.error).__name__ == "InternalServerError"
    assert (met.session.stop, met.session.cause) == (Stop.INFRASTRUCTURE, "engine_status_500")
    assert met.metadata["stop"] == "agent_error"


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_an_interrupted_turn_goes_on_where_it_was(agent: type, tmp_path: Path) -> None:
    faults = [Fault("abort", keep=3), Fault("abort", keep=0)]
    script = turns(agent, "chatml")
    # An interrupted turn goes on with the next entry of the script: three parts make the first turn.
    met = await meeting(
        agent, "chatml", tmp_path, ["one and more of it", "two", *script], faults=faults, instruction=INSTRUCTION
    )
    assert met.error is None
    check_truth(met.session, met.samples)
    assert len(met.session.segments) == 1
    assert len(met.session.turns) == len(met.samples) - 2


class Client:
    """An agent of somebody else's: `steps` gets an endpoint."""

    def __init__(self, logs_dir: Path, base_url: str, model_name: str, skip_model_parsing: bool, steps: Any) -> None:
        self.base_url, self.steps = base_url, steps

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        async with Endpoint(self.base_url, None, timeout_s=20.0) as endpoint:
            await self.steps(endpoint)


async def say(endpoint: Endpoint, messages: list[Any]) -> Reply:
    reply = await endpoint.ask(messages)
    assert isinstance(reply, Reply)
    return reply


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("template", TEMPLATES)
async def test_an_agent_that_edits_its_history(template: str, tmp_path: Path) -> None:
    """Each sampled token is trained on once, behind what the policy saw then; the edit starts a new segment."""

    async def steps(endpoint: Endpoint) -> None:
        first = await say(endpoint, [user("a")])
        second = await say(endpoint, [user("a"), first.message, user("b")])
        summary = [user("a, in short"), first.message, user("c")]
        third = await say(endpoint, summary)
        await say(endpoint, [*summary, third.message, user("d")])
        await say(endpoint, [user("a"), first.message, user("b"), second.message, user("e")])

    met = await meeting(Client, template, tmp_path, [], options={"steps": steps})
    assert met.error is None
    check_truth(met.session, met.samples)
    assert (len(met.session.turns), len(met.samples)) == (5, 5)
    assert met.forks == ["history_edited"]
    assert [turn.segment for turn in met.session.turns] == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("template", TEMPLATES)
async def test_two_calls_in_flight(template: str, tmp_path: Path) -> None:
    """Two continuations of one history at once: one goes on in its segment, the other begins one."""

    async def steps(endpoint: Endpoint) -> None:
        first = await say(endpoint, [user("a")])
        history = [user("a"), first.message]
        one, two = await asyncio.gather(
            say(endpoint, [*history, user("b")]),
            say(endpoint, [*history, user("c")]),
        )
        await asyncio.gather(
            say(endpoint, [*history, user("b"), one.message, user("d")]),
            say(endpoint, [*history, user("c"), two.message, user("e")]),
        )

    met = await meeting(Client, template, tmp_path, [], options={"steps": steps})
    assert met.error is None
    check_truth(met.session, met.samples)
    assert (len(met.session.turns), len(met.samples), len(met.session.segments)) == (5, 5, 2)
    assert len(met.forks) == 1


@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_same_request_twice_at_once_is_one_turn(template: str, tmp_path: Path) -> None:
    async def steps(endpoint: Endpoint) -> None:
        one, two = await asyncio.gather(say(endpoint, [user("a")]), say(endpoint, [user("a")]))
        assert one.message == two.message

    met = await meeting(Client, template, tmp_path, [], options={"steps": steps})
    assert met.error is None
    check_truth(met.session, met.samples)
    assert (len(met.session.turns), met.session.retries_deduplicated, met.forks) == (1, 1, [])


async def test_tools_that_change_start_a_new_segment(tmp_path: Path) -> None:
    async def steps(endpoint: Endpoint) -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        first = await say(endpoint, [user("a")])
        await endpoint.ask([user("a"), first.message, user("b")], [tool])

    met = await meeting(Client, "default_system", tmp_path, [], options={"steps": steps})
    check_truth(met.session, met.samples)
    assert met.forks == ["context_changed"]


@pytest.mark.parametrize("template", ["strips_thinking", "ifm"])
async def test_a_hundred_turns_are_one_segment(template: str, tmp_path: Path) -> None:
    script = [call(template, "bash", command="true")] * 99 + [call(template, "submit")]
    script = [thought(template, text) for text in script]
    met = await meeting(BashAgent, template, tmp_path, script)
    check(met, BashAgent)
    assert (len(met.samples), met.metadata["stop"]) == (100, "finished")
