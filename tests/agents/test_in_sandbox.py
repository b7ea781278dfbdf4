"""Our agents in real trials: real sandboxes, real tasks, a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rl360.config.compose import Request, compose
from rl360.config.schemas import AgentConfig, SandboxConfig
from rl360.rollout.trial_worker import TrialWorker
from rl360.types import AttemptSpec, Sampling, Task, TrialResult
from tests.agents.kit import TURNS_USED, Endpoint, completion, serving

pytestmark = pytest.mark.sandbox

TOML = 'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n'
TEST_SH = """#!/bin/bash
if [ "$(cat /app/out 2>/dev/null)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
DOUBLE_SH = """#!/bin/bash
cd /app
if timeout 10 python3 -S -c 'from solution import double; assert double(7) == 14'; then echo 1; else echo 0; fi \\
  > /logs/verifier/reward.txt
"""


def make_task(folder: Path, *, test_sh: str = TEST_SH, dockerfile: str = "", toml: str = "", **files: str) -> Task:
    contents = {
        "instruction.md": "Write `double(x)`.\n",
        "task.toml": TOML + toml,
        "environment/Dockerfile": f"FROM x\nWORKDIR /app\n{dockerfile}",
        "tests/test.sh": test_sh,
        "solution/solve.sh": "#!/bin/bash\necho done >/app/out\n",
        **files,
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Task(folder.name, folder, ("test",), "")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent-cache")


RunTrial = Callable[..., Awaitable[tuple[TrialResult, Endpoint]]]


@pytest_asyncio.fixture
async def trial(cache: Path, tmp_path: Path) -> AsyncIterator[RunTrial]:
    """`await trial("bash", task, script, **kwargs of the agent)`, with the shipped option of that name."""
    workers: list[TrialWorker] = []

    async def run(option: str, task: Task, script: list[Any], **kwargs: Any) -> tuple[TrialResult, Endpoint]:
        shipped = compose(Request((f"agent={option}",))).values["agent"]
        agent = {**asdict(AgentConfig()), **shipped, "kwargs": {**shipped.get("kwargs", {}), **kwargs}}
        worker = TrialWorker(
            agent=agent,
            sandbox=asdict(SandboxConfig()),
            cache_dir=cache,
            trials_dir=tmp_path / "trials",
            trial_timeout_s=60.0,
            model_name="stub",
            max_concurrent=1,
            start_interval_s=0.0,
            run_id="test",
        )
        workers.append(worker)
        await worker.start()
        spec = AttemptSpec("i00000-t-0", "g", 0, task, Sampling(max_turns=agent["max_turns"]), 0)
        async with serving(script) as endpoint:
            return await worker.run(spec, endpoint.url), endpoint

    yield run
    for worker in workers:
        await worker.close()


def bash(command: str) -> list[tuple[str, Any]]:
    return [("bash", {"command": command})]


SUBMIT: list[tuple[str, Any]] = [("submit", {})]


async def test_bash_solves_a_task(trial: RunTrial, tmp_path: Path) -> None:
    script = [
        bash("mkdir -p d; cd d; export WORD=done; sleep 60 & echo started"),
        bash("pwd; echo $WORD; jobs; pgrep -c sleep"),
        [("edit", {"path": "f", "old_text": "", "new_text": "doing\n"})],
        [("edit", {"path": "f", "old_text": "ing", "new_text": "ne"}), ("view", {"path": "/app/d/f"})],
        bash("cp f ../out"),
        SUBMIT,
    ]
    result, endpoint = await trial("bash", make_task(tmp_path / "t"), script)
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    assert (result.agent_metadata["stop"], result.agent_metadata["turns"]) == ("finished", 6)
    said = [m["content"] for m in endpoint.messages if m["role"] == "tool"]
    assert said[1] == "[exit code 0]\n/app/d\ndone\n1"
    assert said[4] == "     1\tdone"


async def test_bash_is_cut_at_the_cap_and_still_verified(trial: RunTrial, tmp_path: Path) -> None:
    result, _ = await trial("bash", make_task(tmp_path / "t"), [bash("echo done >out"), TURNS_USED])
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    assert result.agent_metadata["stop"] == "turns"


async def test_bash_gives_up_and_is_still_verified(trial: RunTrial, tmp_path: Path) -> None:
    result, _ = await trial("bash", make_task(tmp_path / "t"), ["hm"] * 3)
    assert (result.rewards, result.exception_type) == ({"reward": 0.0}, None)
    assert (result.agent_metadata["stop"], result.agent_metadata["format_ok"]) == ("gave_up", False)


async def test_bash_as_another_user(trial: RunTrial, tmp_path: Path) -> None:
    """Tools run as the task's agent user: files that it may not touch stay as they are."""
    task = make_task(tmp_path / "t", dockerfile="RUN chmod 777 /app && echo root >/app/owned\n")
    (task.path / "task.toml").write_text(TOML.replace("[agent]", '[agent]\nuser = "nobody"'))
    script = [
        bash("id -un"),
        [("edit", {"path": "owned", "old_text": "root", "new_text": "me"})],
        [("edit", {"path": "out", "old_text": "", "new_text": "done"})],
        SUBMIT,
    ]
    result, endpoint = await trial("bash", task, script)
    said = [m["content"] for m in endpoint.messages if m["role"] == "tool"]
    assert said[0] == "[exit code 0]\nnobody"
    assert "Permission denied" in said[1]
    assert result.rewards == {"reward": 1.0}


async def test_endless_output_and_a_flood(trial: RunTrial, tmp_path: Path) -> None:
    script = [bash("yes"), bash("seq 100000"), bash("echo done >out"), SUBMIT]
    result, endpoint = await trial("bash", make_task(tmp_path / "t"), script, command_timeout_s=0.5)
    said = [m["content"] for m in endpoint.messages if m["role"] == "tool"]
    assert all(len(text) < 8200 and "bytes left out" in text for text in said[:2])
    assert result.rewards == {"reward": 1.0}


async def test_bash_text_solves_a_task(trial: RunTrial, tmp_path: Path) -> None:
    script = ["```bash\necho done >out\n```", "```bash\nsubmit\n```"]
    result, _ = await trial("bash_text", make_task(tmp_path / "t"), script)
    assert (result.rewards, result.agent_metadata["stop"]) == ({"reward": 1.0}, "finished")


async def test_repair_sees_the_public_example_and_never_the_hidden_test(trial: RunTrial, tmp_path: Path) -> None:
    examples = (
        "from solution import double\ngot = double(2)\nif got != 4:\n    raise SystemExit(f'double(2) gave {got}')\n"
    )
    task = make_task(
        tmp_path / "t",
        test_sh=DOUBLE_SH,
        dockerfile="COPY examples.py /app/examples.py\n",
        **{"environment/examples.py": f"import sys\nsys.path.insert(0, '/app')\n{examples}"},
    )
    wrong, right = (f"```python\ndef double(x):\n    return {body}\n```" for body in ("x * x * x", "x + x"))
    result, endpoint = await trial("repair_text", task, [wrong, right])
    assert (result.rewards, result.agent_metadata["stop"]) == ({"reward": 1.0}, "finished")
    assert "double(2) gave 8" in endpoint.messages[-1]["content"]
    # Right on the example alone: the attempt ends, and the hidden test says no.
    result, endpoint = await trial("repair_text", task, ["```python\ndef double(x):\n    return x * x\n```"])
    assert (result.rewards, len(endpoint.requests)) == ({"reward": 0.0}, 1)


@pytest.mark.parametrize(
    ("pool", "body", "complaint"),
    [
        ("small_coding", "def sign(n)", "SyntaxError: expected ':' (line 1: def sign(n))"),
        ("small_coding_repair", "def sign(n): return 1", "sign(-2) gave 1, expected -1"),
    ],
)
async def test_repair_on_a_bundled_task(trial: RunTrial, pool: str, body: str, complaint: str) -> None:
    folder = Path(__file__).parents[2] / "rl360/tasks/bundled" / pool / "logic-sign"
    script = [
        f"```python\n{body}\n```",
        "```python\ndef sign(n):\n    return (n > 0) - (n < 0)\n```",
    ]
    result, endpoint = await trial("repair_text", Task("logic-sign", folder, ("logic",), ""), script)
    assert (result.rewards, result.agent_metadata["turns"]) == ({"reward": 1.0}, 2)
    assert complaint in endpoint.messages[-1]["content"]


def act(*keys: str, complete: bool = False) -> str:
    commands = [{"keystrokes": key, "duration": 0.2} for key in keys]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete})


async def test_terminus_2_in_tmux(trial: RunTrial, tmp_path: Path) -> None:
    script = [act("echo do''ne\n"), act("echo done >out\n"), act(complete=True), act(complete=True)]
    result, endpoint = await trial("terminus_2", make_task(tmp_path / "t"), script)
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    assert (result.agent_metadata["stop"], result.agent_metadata["turns"]) == ("finished", 4)
    assert "\ndone\n" in endpoint.requests[1]["messages"][-1]["content"]


async def test_terminus_2_with_nothing_but_cut_turns_is_still_verified(trial: RunTrial, tmp_path: Path) -> None:
    cut = completion(act("ls\n")[:-9], "length")
    result, endpoint = await trial("terminus_2", make_task(tmp_path / "t"), [act("echo done >out\n"), *[cut] * 99])
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    assert (len(endpoint.requests), result.agent_metadata["stop"]) == (4, "gave_up")


@pytest.mark.parametrize("keys", ["exit\n", "tmux kill-server\n", "rm /usr/bin/tmux\n"])
async def test_terminus_2_whose_shell_the_policy_ended_is_still_verified(
    trial: RunTrial, tmp_path: Path, keys: str
) -> None:
    """The keystrokes that follow cannot be sent, which is no failure of the sandbox."""
    script = [act("echo done >out\n", keys, "ls\n"), *[act("ls\n")] * 9]
    result, endpoint = await trial("terminus_2", make_task(tmp_path / "t"), script)
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    assert (result.agent_metadata["stop"], len(endpoint.requests)) == ("gave_up", 1)


@pytest.mark.parametrize("reply", ['{"a":' * 1500, act("\ud800"), act("ls\n").replace('"a"', '"\\ud800"')])
async def test_terminus_2_with_unreadable_replies_is_still_verified(
    trial: RunTrial, tmp_path: Path, reply: str
) -> None:
    result, _ = await trial("terminus_2", make_task(tmp_path / "t"), [act("echo done >out\n"), *[reply] * 9])
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    assert (result.agent_metadata["stop"], result.agent_metadata["format_failures"]) == ("gave_up", 3)


@pytest.mark.parametrize(
    "harm",
    [
        "printf '#!/bin/sh\nprintf ²\n' >/usr/bin/mkdir",
        "printf '#!/bin/sh\nprintf a\n' >/usr/bin/base64",
        "rm /usr/bin/timeout",
        "sed -i d /etc/passwd",
    ],
)
async def test_bash_in_a_sandbox_that_the_policy_broke_is_still_verified(
    trial: RunTrial, tmp_path: Path, harm: str
) -> None:
    edit = ("edit", {"path": "f", "old_text": "a", "new_text": "b"})
    script = [bash(f"echo done >out; echo a >f; {harm}"), [edit, ("view", {"path": "f"})], *[[edit]] * 9]
    result, _ = await trial("bash", make_task(tmp_path / "t"), script)
    assert (result.exception_type, result.agent_metadata["stop"]) in {(None, "gave_up"), (None, "turns")}
    assert result.rewards == {"reward": 1.0}


async def test_any_harbor_agent_by_name(trial: RunTrial, tmp_path: Path) -> None:
    result, endpoint = await trial("harbor", make_task(tmp_path / "t"), [], agent="nop")
    assert (result.rewards, endpoint.requests) == ({"reward": 0.0}, [])


async def test_any_harbor_agent_by_import_path(trial: RunTrial, tmp_path: Path) -> None:
    script = ["```bash\necho done >out\n```", "```bash\nsubmit\n```"]
    path = "rl360.agents.bash_text:BashTextAgent"
    result, _ = await trial("harbor", make_task(tmp_path / "t"), script, agent=path, options={"max_failures": 1})
    assert (result.rewards, result.agent_metadata["stop"]) == ({"reward": 1.0}, "finished")
