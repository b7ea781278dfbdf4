"""The bash agent on a scripted endpoint: the history that it sends, what its tools do, how it ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from harbor.models.agent.context import AgentContext  # isort: skip
from rl360.agents.bash import CUT, NO_CALL, SYSTEM_PROMPT, BashAgent
from rl360.agents.endpoint import APIConnectionError, BadRequestError, InternalServerError
from rl360.agents.tools import TOOLS, MalformedCall, read_arguments
from tests.agents.kit import TOKENS_USED, TURNS_USED, LocalEnvironment, attempt, completion, make, serving


def bash(command: str) -> list[tuple[str, Any]]:
    return [("bash", {"command": command})]


SUBMIT: list[tuple[str, Any]] = [("submit", {})]


async def test_a_whole_attempt(tmp_path: Path) -> None:
    script = [
        completion("look", "tool_calls", bash("mkdir d; cd d; echo hi >f"), reasoning_content="because"),
        [("view", {"path": "f"}), ("edit", {"path": "f", "old_text": "hi", "new_text": "ho"})],
        bash("cat f; exit 3"),
        SUBMIT,
    ]
    metadata, endpoint, environment = await attempt(BashAgent, tmp_path, script, instruction="Fix it.")
    assert (environment.app / "d" / "f").read_text() == "ho\n"
    assert metadata == {
        "stop": "finished",
        "format_ok": True,
        "turns": 4,
        "format_failures": 0,
        "tool_failures": 0,
        "actions": 4,
        "code_chars": 0,
    }
    assert endpoint.requests[0]["messages"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "Fix it."},
    ]
    assert all(request["tools"] == list(TOOLS) for request in endpoint.requests)
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in endpoint.messages if m["role"] == "tool"] == [
        ("tool", "call0", "[exit code 0]"),
        ("tool", "call0", "     1\thi"),
        ("tool", "call1", "f: changed"),
        ("tool", "call0", "[exit code 3]\nho"),
    ]
    for before, after in zip(endpoint.requests, endpoint.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    assert endpoint.messages[2] == script[0]["choices"][0]["message"]  # type: ignore[index]


@pytest.mark.parametrize(("refused", "stop"), [(TURNS_USED, "turns"), (TOKENS_USED, "length")])
async def test_a_cap_ends_it_normally(tmp_path: Path, refused: Any, stop: str) -> None:
    metadata, endpoint, _ = await attempt(BashAgent, tmp_path, [bash("true"), refused])
    assert (metadata["stop"], metadata["turns"], len(endpoint.requests)) == (stop, 1, 2)


async def test_replies_without_a_call_are_answered_and_end_it_at_the_third(tmp_path: Path) -> None:
    metadata, endpoint, _ = await attempt(
        BashAgent, tmp_path, ["well", completion("cut", "length"), "hm", "never asked"]
    )
    assert (metadata["stop"], metadata["format_ok"], metadata["format_failures"]) == ("gave_up", False, 3)
    assert [m["content"] for m in endpoint.messages if m["role"] == "user"] == ["Do it.", NO_CALL, CUT]
    assert len(endpoint.requests) == 3


async def test_a_success_starts_the_count_anew(tmp_path: Path) -> None:
    script = ["a", "b", bash("true"), "c", [("view", {"path": "none"})], SUBMIT]
    metadata, _, _ = await attempt(BashAgent, tmp_path, script)
    assert (metadata["stop"], metadata["format_failures"], metadata["tool_failures"]) == ("finished", 3, 1)


async def test_a_command_that_fails_is_no_failed_tool(tmp_path: Path) -> None:
    metadata, _, _ = await attempt(BashAgent, tmp_path, [*[bash("false")] * 5, SUBMIT])
    assert (metadata["stop"], metadata["tool_failures"]) == ("finished", 0)


async def test_tools_that_refuse_end_it_at_the_threshold(tmp_path: Path) -> None:
    script = [[("edit", {"path": "f", "old_text": "x", "new_text": "y"})]] * 2 + [bash("sleep 9")] * 9
    metadata, endpoint, _ = await attempt(BashAgent, tmp_path, script, max_failures=4, command_timeout_s=0.2)
    assert (metadata["stop"], metadata["tool_failures"], metadata["format_ok"]) == ("gave_up", 4, True)
    *refused, stopped = [m["content"] for m in endpoint.messages if m["role"] == "tool"]
    assert refused == ["error: f: no such file"] * 2
    assert stopped.startswith("error: [the command was stopped after 0.2 s]")


async def test_calls_after_submit_are_not_run(tmp_path: Path) -> None:
    metadata, _, environment = await attempt(BashAgent, tmp_path, [[*bash("touch a"), *SUBMIT, *bash("touch b")]])
    assert metadata["stop"] == "finished"
    assert [path.name for path in environment.app.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("python", "{}", "there is no tool 'python'; expected one of bash, view, edit, submit"),
        ("bash", "{command: ls}", "not JSON"),
        ("bash", "[1]", "not an object"),
        ("bash", "{}", "command is missing"),
        ("bash", '{"command": 3}', "command is not a string"),
        ("bash", '{"command": null}', "command is not a string"),
        ("bash", '{"command": "ls", "cwd": "/"}', "there is no cwd; expected command"),
        ("view", '{"path": "f", "start_line": "x"}', "start_line is not an integer"),
        ("view", '{"path": "f", "start_line": true}', "start_line is not an integer"),
        ("view", '{"path": "f", "start_line": "²"}', "start_line is not an integer"),
        ("view", '{"path": "f", "start_line": "٣"}', "start_line is not an integer"),
        ("view", f'{{"path": "f", "end_line": "{"9" * 5000}"}}', "end_line is not an integer"),
        ("view", f'{{"path": "f", "end_line": {"9" * 4000}}}', "end_line is too large; expected at most 1000000000"),
        ("view", f'{{"path": "f", "end_line": {"9" * 5000}}}', "not JSON"),
        ("bash", '{"command":' * 20_000, "nested too deeply"),
        ("submit", '{"answer": 1}', "there is no answer; expected no argument"),
    ],
)
async def test_malformed_calls_are_answered_with_what_is_wrong(
    tmp_path: Path, name: str, arguments: str, why: str
) -> None:
    with pytest.raises(MalformedCall, match=re.escape(why)) as caught:
        read_arguments(name, arguments)
    metadata, endpoint, _ = await attempt(BashAgent, tmp_path, [[(name, arguments)], SUBMIT])
    assert endpoint.messages[-1]["content"] == f"error: {caught.value}"
    assert (metadata["stop"], metadata["format_ok"], metadata["format_failures"]) == ("finished", False, 1)


@pytest.mark.parametrize(
    ("name", "arguments", "read"),
    [
        ("submit", "", {}),
        ("view", '{"path": "f", "start_line": "12", "end_line": null}', {"path": "f", "start_line": 12}),
        ("bash", {"command": "ls"}, {"command": "ls"}),
    ],
)
def test_arguments_are_read_generously(name: str, arguments: object, read: dict[str, Any]) -> None:
    assert read_arguments(name, arguments) == read


async def test_view(tmp_path: Path) -> None:
    script = [
        bash("printf '1\\n2\\n3\\n4\\n' >f; mkdir sub; touch sub/x"),
        [("view", {"path": "f", "start_line": 2, "end_line": 3}), ("view", {"path": "sub"}), ("view", {"path": "no"})],
        SUBMIT,
    ]
    _, endpoint, _ = await attempt(BashAgent, tmp_path, script)
    some, folder, nothing = [m["content"] for m in endpoint.messages if m["role"] == "tool"][1:]
    assert some == "     2\t2\n     3\t3"
    assert folder.endswith(" x")
    assert nothing == "error: no: no such file"


@pytest.mark.parametrize(
    ("old", "new", "answer", "left"),
    [
        ("b", "X", "f: changed", "aXa"),
        ("a", "X", "error: f: old_text stands 2 times in the file; expected exactly once", "aba"),
        ("c", "X", "error: f: old_text stands 0 times in the file; expected exactly once", "aba"),
        ("", "X", "error: f: is there already; give the old_text to replace", "aba"),
    ],
)
async def test_edit(tmp_path: Path, old: str, new: str, answer: str, left: str) -> None:
    script = [bash("printf aba >f"), [("edit", {"path": "f", "old_text": old, "new_text": new})], SUBMIT]
    _, endpoint, environment = await attempt(BashAgent, tmp_path, script)
    assert (endpoint.messages[-1]["content"], (environment.app / "f").read_text()) == (answer, left)


async def test_edit_makes_a_file_and_its_folders(tmp_path: Path) -> None:
    script = [[("edit", {"path": "new/f", "old_text": "", "new_text": "é\n"})], SUBMIT]
    _, endpoint, environment = await attempt(BashAgent, tmp_path, script)
    assert (endpoint.messages[-1]["content"], (environment.app / "new/f").read_text()) == ("new/f: made", "é\n")


async def test_a_retry_after_an_error_is_the_same_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl360.agents.endpoint._FIRST_PAUSE_S", 0.01)
    metadata, endpoint, _ = await attempt(BashAgent, tmp_path, [(502, "x"), (503, "x"), SUBMIT])
    assert (metadata["stop"], len(endpoint.requests)) == ("finished", 3)
    assert endpoint.requests[0] == endpoint.requests[1] == endpoint.requests[2]


@pytest.mark.parametrize(
    ("reply", "kind", "requests"),
    [((502, "x"), InternalServerError, 3), ((504, "x"), InternalServerError, 1), ((404, "x"), BadRequestError, 1)],
)
async def test_errors_that_stay_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: Any, kind: type[Exception], requests: int
) -> None:
    monkeypatch.setattr("rl360.agents.endpoint._FIRST_PAUSE_S", 0.01)
    context = AgentContext()
    async with serving([reply] * 9) as endpoint:
        agent = make(BashAgent, tmp_path, endpoint.url)
        with pytest.raises(kind, match=str(reply[0])):
            await agent.run("x", LocalEnvironment(tmp_path / "sandbox"), context)
    assert len(endpoint.requests) == requests
    assert context.metadata is not None
    assert context.metadata["stop"] == "agent_error"


async def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl360.agents.endpoint._FIRST_PAUSE_S", 0.01)
    agent = make(BashAgent, tmp_path, "http://127.0.0.1:9/v1")
    with pytest.raises(APIConnectionError, match=r"127\.0\.0\.1:9"):
        await agent.run("x", LocalEnvironment(tmp_path / "sandbox"), AgentContext())


async def test_a_dead_sandbox_is_not_the_models_failure(tmp_path: Path) -> None:
    class Gone(LocalEnvironment):
        async def exec(self, command: str, timeout_sec: int | None = None, **_: Any) -> Any:
            raise RuntimeError("the sandbox is not running")

    async with serving([bash("true")]) as endpoint:
        with pytest.raises(RuntimeError, match="not running"):
            await make(BashAgent, tmp_path, endpoint.url).run("x", Gone(tmp_path / "sandbox"), AgentContext())


async def test_metadata_is_there_when_harbor_cancels(tmp_path: Path) -> None:
    context = AgentContext()
    async with serving([bash("sleep 20")]) as endpoint:
        agent = make(BashAgent, tmp_path, endpoint.url, command_timeout_s=1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await agent.run("x", LocalEnvironment(tmp_path / "sandbox"), context)
    assert context.metadata is not None
    assert context.metadata["stop"] == "timeout"


async def test_no_system_prompt(tmp_path: Path) -> None:
    _, endpoint, _ = await attempt(BashAgent, tmp_path, [SUBMIT], system_prompt="")
    assert [m["role"] for m in endpoint.messages] == ["user"]


@pytest.mark.parametrize(
    ("tool", "forged"), [("mkdir", "printf ²"), ("base64", "printf a"), ("wc", "echo x"), ("bash", "exit 3")]
)
async def test_a_sandbox_whose_tools_the_policy_replaced_ends_nothing(tmp_path: Path, tool: str, forged: str) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / tool).write_text(f"#!/bin/sh\n{forged}\n")
    (bin_folder / tool).chmod(0o755)

    class Replaced(LocalEnvironment):
        async def exec(self, command: str, timeout_sec: int | None = None, **_: Any) -> Any:
            return await super().exec(f"PATH={bin_folder}:$PATH; {command}", timeout_sec)

    environment, context = Replaced(tmp_path / "sandbox"), AgentContext()
    (environment.app / "f").write_text("a")
    script = [bash("true"), [("edit", {"path": "f", "old_text": "a", "new_text": "b"})], [("view", {"path": "f"})]]
    async with serving([*script, SUBMIT]) as endpoint:
        await make(BashAgent, tmp_path, endpoint.url).run("Do it.", environment, context)
    assert context.metadata is not None
    assert (context.metadata["stop"], context.metadata["turns"]) == ("finished", 4)


class Failing(LocalEnvironment):
    """Commands other than the check of the sandbox raise an error; `dead`: so does the check."""

    def __init__(self, folder: Path, error: Exception, dead: bool) -> None:
        super().__init__(folder)
        self.error, self.dead = error, dead

    async def exec(self, command: str, timeout_sec: int | None = None, **_: Any) -> Any:
        if command == "true" and not self.dead:
            return await super().exec(command, timeout_sec)
        raise self.error


ERRORS = [ValueError("embedded null"), RecursionError(), OSError(7, "Argument list too long"), RuntimeError("no user")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_fails_in_a_living_sandbox_is_a_failed_turn(tmp_path: Path, error: Exception) -> None:
    environment, context = Failing(tmp_path / "sandbox", error, dead=False), AgentContext()
    async with serving([[*bash("ls"), *bash("pwd")]] * 5) as endpoint:
        await make(BashAgent, tmp_path, endpoint.url).run("Do it.", environment, context)
    assert context.metadata is not None
    assert (context.metadata["stop"], context.metadata["tool_failures"]) == ("gave_up", 3)
    answers = [(m["tool_call_id"], m["content"]) for m in endpoint.messages if m["role"] == "tool"]
    said = f"error: that could not be done ({type(error).__name__})"
    assert answers == [("call0", said), ("call1", said)] * 2


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_fails_in_a_dead_sandbox_is_raised(tmp_path: Path, error: Exception) -> None:
    environment, context = Failing(tmp_path / "sandbox", error, dead=True), AgentContext()
    async with serving([bash("ls")] * 5) as endpoint:
        with pytest.raises(type(error)):
            await make(BashAgent, tmp_path, endpoint.url).run("Do it.", environment, context)
    assert context.metadata is not None
    assert context.metadata["stop"] == "agent_error"


async def test_what_cannot_be_encoded_is_not_sent_to_the_model(tmp_path: Path) -> None:
    script = [[("edit", {"path": "\ud800", "old_text": "a", "new_text": "b"})], SUBMIT]
    metadata, endpoint, _ = await attempt(BashAgent, tmp_path, script)
    assert (metadata["stop"], endpoint.messages[-1]["content"]) == ("finished", "error: ?: no such file")


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": None}])
async def test_an_answer_that_is_no_completion_is_the_endpoints_failure(tmp_path: Path, answer: Any) -> None:
    with pytest.raises(APIConnectionError, match="no chat completion"):
        await attempt(BashAgent, tmp_path, [answer])
