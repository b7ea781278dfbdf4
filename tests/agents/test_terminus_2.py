"""Harbor's terminus-2 as we configure it: its loop is cut, its history only grows, a cap ends it normally."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harbor.models.agent.context import AgentContext  # isort: skip
from rl360.agents.endpoint import InternalServerError
from rl360.agents.terminus_2 import CUT, NOT_SENT, Terminus2Agent
from tests.agents.kit import TOKENS_USED, TURNS_USED, Endpoint, NoSandbox, Result, Terminal, completion, make, serving


def act(*keys: str, complete: bool = False) -> str:
    commands = [{"keystrokes": key, "duration": 0.0} for key in keys]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete})


DONE = act(complete=True)


async def run(
    folder: Path, script: list[Any], terminal: Terminal | None = None, sandbox: Any = None, **kwargs: Any
) -> tuple[dict[str, Any], Endpoint, Terminal]:
    terminal, context = terminal or Terminal(), AgentContext()
    async with serving(script) as endpoint:
        agent = make(Terminus2Agent, folder, endpoint.url, **{"max_turns": 10, **kwargs})
        agent._session = terminal
        try:
            await agent.run("Do it.", sandbox or NoSandbox(), context)
        finally:
            assert context.metadata is not None
            endpoint.metadata = context.metadata  # type: ignore[attr-defined]
    return context.metadata, endpoint, terminal


async def test_a_whole_attempt(tmp_path: Path) -> None:
    metadata, endpoint, terminal = await run(tmp_path, [act("ls\n"), act("cat f\n", "x\n"), DONE, DONE])
    assert terminal.keys == ["ls\n", "cat f\n", "x\n"]
    assert {k: metadata[k] for k in ("stop", "format_ok", "turns", "format_failures")} == {
        "stop": "finished",
        "format_ok": True,
        "turns": 4,
        "format_failures": 0,
    }
    for before, after in zip(endpoint.requests, endpoint.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    assert [m["role"] for m in endpoint.messages] == ["user", "assistant"] * 3 + ["user"]


async def test_endless_length_stops_are_turns_and_end_it(tmp_path: Path) -> None:
    """Harbor's own asks again inside itself, uncounted: 316 calls with max_turns=2, then a RecursionError."""
    cut = completion(act("ls\n")[:-20], "length")
    metadata, endpoint, terminal = await run(tmp_path, [cut] * 400, max_turns=2)
    assert (len(endpoint.requests), metadata["stop"], metadata["turns"], terminal.keys) == (2, "turns", 2, [])
    assert CUT in endpoint.messages[-1]["content"]
    metadata, endpoint, _ = await run(tmp_path, [cut] * 400, max_turns=100)
    assert (len(endpoint.requests), metadata["stop"], metadata["format_failures"]) == (3, "gave_up", 3)


async def test_a_whole_answer_that_was_cut_is_not_run(tmp_path: Path) -> None:
    """The text may be readable by chance; what would have followed is not known."""
    _, _, terminal = await run(tmp_path, [completion(act("rm -r x\n"), "length"), DONE, DONE])
    assert terminal.keys == []


@pytest.mark.parametrize(("refused", "stop"), [(TURNS_USED, "turns"), (TOKENS_USED, "length")])
async def test_a_cap_ends_it_normally(tmp_path: Path, refused: Any, stop: str) -> None:
    metadata, endpoint, _ = await run(tmp_path, [act("ls\n"), refused, act("ls\n")])
    assert (metadata["stop"], metadata["turns"], len(endpoint.requests)) == (stop, 1, 2)


async def test_unreadable_replies_are_answered_and_end_it_at_the_third(tmp_path: Path) -> None:
    metadata, endpoint, _ = await run(tmp_path, ["hm", act("ls\n"), "hm", "hm", "hm", "never asked"])
    assert (metadata["stop"], metadata["format_failures"], len(endpoint.requests)) == ("gave_up", 4, 5)
    assert "parsing errors" in endpoint.messages[2]["content"]


async def test_a_closed_shell_is_the_policys_end(tmp_path: Path) -> None:
    metadata, _, _ = await run(tmp_path, [act("exit\n"), act("ls\n")], Terminal(ends_after=1))
    assert (metadata["stop"], metadata["turns"]) == ("gave_up", 1)


class Sandbox:
    """Answers any command, or is dead."""

    default_user = None

    def __init__(self, dead: bool = False) -> None:
        self.dead = dead

    async def exec(self, command: str, **_: Any) -> Result:
        if self.dead:
            raise RuntimeError("the sandbox ended")
        return Result("", "", 127 if command == "true" else 0)  # the policy may have removed even this


@pytest.mark.parametrize("keys", ["exit\n", "tmux kill-server\n"])
async def test_keys_after_the_ones_that_end_the_shell_make_it_no_failure_of_the_sandbox(
    tmp_path: Path, keys: str
) -> None:
    metadata, endpoint, _ = await run(tmp_path, [act(keys, "ls\n"), DONE], Terminal(ends_after=1), Sandbox())
    assert (metadata["stop"], metadata["turns"], len(endpoint.requests)) == ("gave_up", 1, 1)


async def test_a_dead_sandbox_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="failed to send"):
        await run(tmp_path, [act("exit\n", "ls\n")], Terminal(ends_after=1), Sandbox(dead=True))


async def test_keys_that_a_living_terminal_refuses_are_a_failed_turn(tmp_path: Path) -> None:
    script = [act("no"), act("ls\n"), *[act("no")] * 3, "never asked"]
    metadata, endpoint, _ = await run(tmp_path, script, Terminal(refuses="no"), Sandbox())
    assert (metadata["stop"], metadata["format_failures"], len(endpoint.requests)) == ("gave_up", 0, 5)
    assert NOT_SENT in endpoint.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    "reply",
    [
        '{"a":' * 1500,
        '{"a":' * 100_000,
        act("\ud800"),
        act("ls\n").replace('"a"', '"\\ud800"'),
        act("ls\n").replace('"p"', '"\\udfff"'),
    ],
)
@pytest.mark.parametrize("parser", ["json", "xml"])
async def test_replies_that_harbors_parser_fails_on_are_format_failures(
    tmp_path: Path, reply: str, parser: str
) -> None:
    metadata, endpoint, terminal = await run(tmp_path, [reply, DONE], sandbox=Sandbox(), parser_name=parser)
    assert (metadata["format_failures"], terminal.keys) == (1 if parser == "json" else 2, [])
    assert "parsing errors" in endpoint.requests[1]["messages"][-1]["content"]


async def test_whatever_else_fails_after_a_reply_ends_it_normally(tmp_path: Path) -> None:
    class Broken(Terminal):
        async def is_session_alive(self) -> bool:
            if self.keys:
                raise ZeroDivisionError
            return True

    class Unstarted(Terminal):
        async def is_session_alive(self) -> bool:
            raise ZeroDivisionError

    metadata, _, _ = await run(tmp_path, [act("ls\n"), DONE], Broken(), Sandbox())
    assert (metadata["stop"], metadata["turns"]) == ("agent_error", 1)
    with pytest.raises(ZeroDivisionError):
        await run(tmp_path, [DONE], Unstarted(), Sandbox())


async def test_a_confirmation_that_is_taken_back_is_no_end(tmp_path: Path) -> None:
    metadata, endpoint, _ = await run(tmp_path, [DONE, act("ls\n"), DONE, DONE])
    assert (metadata["stop"], len(endpoint.requests)) == ("finished", 4)


async def test_one_request_for_a_failure_that_stays(tmp_path: Path) -> None:
    """Harbor's makes nine over 25 s."""
    context = AgentContext()
    async with serving([(500, "x")] * 20) as endpoint:
        agent = make(Terminus2Agent, tmp_path, endpoint.url, max_turns=2, request_retries=0)
        agent._session = Terminal()
        with pytest.raises(InternalServerError):
            await agent.run("Do it.", NoSandbox(), context)
    assert len(endpoint.requests) == 1
    assert context.metadata is not None
    assert context.metadata["stop"] == "agent_error"


def test_what_would_rewrite_the_history_is_off_whatever_a_config_says(tmp_path: Path) -> None:
    agent = make(Terminus2Agent, tmp_path, "http://x/v1", enable_summarize=True, record_terminal_session=True)
    assert (agent.options.enable_summarize, agent.options.record_terminal_session) == (False, False)
    with pytest.raises(ValueError, match="parser_nam"):
        make(Terminus2Agent, tmp_path, "http://x/v1", parser_nam="xml")
