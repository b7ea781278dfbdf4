"""Harbor trials for real, one for each way in which a trial can end; and what a worker does around them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio
from aiohttp import web

from rl360.config.schemas import AgentConfig, SandboxConfig
from rl360.rollout.failures import DISK_FULL
from rl360.rollout.trial_worker import TrialWorker
from rl360.types import AttemptSpec, Sampling, Task, TrialResult

pytestmark = pytest.mark.sandbox

GOOD = "```python\ndef double(x):\n    return 2 * x\n```"
WRONG = "```python\ndef double(x):\n    return x\n```"
TEST_SH = """#!/bin/bash
if timeout 10 python3 -S /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
CHECK_PY = 'import sys\nsys.path.insert(0, "/app")\nfrom solution import double\nassert double(3) == 6\n'
CHEATER_SETUP_S = 1.5
BREAKS_AGENT = f"{__name__}:Breaks"
LOOP_AGENT = f"{__name__}:LeavesALoop"


def make_task(
    folder: Path,
    *,
    test_sh: str = TEST_SH,
    dockerfile: str = "FROM x\nWORKDIR /app\n",
    toml: str = "",
) -> Task:
    files = {
        "instruction.md": "Write `double(x)`.\n",
        "task.toml": f'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n{toml}',
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test_sh,
        "tests/check.py": CHECK_PY,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Task(folder.name, folder, ("test",), "")


@pytest_asyncio.fixture
async def model() -> AsyncIterator[SimpleNamespace]:
    """A stub model: `.reply` is the text, or an int for a status; `.delay_s` before it answers."""
    state = SimpleNamespace(reply=GOOD, delay_s=0.0, url="", open=0, most_open=0, asked=asyncio.Event())

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        state.open += 1
        state.asked.set()
        state.most_open = max(state.most_open, state.open)
        try:
            await asyncio.sleep(state.delay_s)
        finally:
            state.open -= 1
        if isinstance(state.reply, int):
            return web.Response(status=state.reply, text="stub")
        message = {"role": "assistant", "content": state.reply}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield state
    await runner.cleanup()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trial-cache")


MakeWorker = Callable[..., Any]


@pytest_asyncio.fixture
async def make_worker(cache: Path, tmp_path: Path) -> AsyncIterator[MakeWorker]:
    workers = []

    async def make(
        agent: dict[str, Any] | None = None, sandbox: dict[str, Any] | None = None, **kwargs: Any
    ) -> TrialWorker:
        settings: dict[str, Any] = {"trial_timeout_s": 60.0, "max_concurrent": 4, "start_interval_s": 0.0, **kwargs}
        worker = TrialWorker(
            agent={**asdict(AgentConfig()), **(agent or {})},
            sandbox={**asdict(SandboxConfig()), **(sandbox or {})},
            cache_dir=cache,
            trials_dir=tmp_path / "trials",
            model_name="stub",
            run_id="test",
            **settings,
        )
        workers.append(worker)
        await worker.start()
        return worker

    yield make
    for worker in workers:
        await worker.close()


def spec(task: Task, number: int = 0) -> AttemptSpec:
    return AttemptSpec(f"i00000-{task.task_id}-{number}", "g", 0, task, Sampling(), 0)


async def one(make_worker: MakeWorker, model: Any, task: Task, **kwargs: Any) -> TrialResult:
    worker = await make_worker(**kwargs)
    result = await worker.run(spec(task), model.url)
    assert isinstance(result, TrialResult)
    return result


async def test_solved(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    result = await one(make_worker, model, make_task(tmp_path / "t"))
    assert (result.rewards, result.exception_type) == ({"reward": 1.0}, None)
    said = {"format_ok": True, "stop": "finished", "code_chars": 32, "finish_reason": "stop"}
    assert result.agent_metadata == {**said, "offline": True}
    assert not result.trial_dir.exists()  # kept only when asked, or when something failed
    assert result.logs == {}
    t = result.timings
    assert min(t.sandbox_s, t.agent_s, t.verify_s) > 0
    assert t.sandbox_s + t.agent_s + t.verify_s <= t.total_s


@pytest.mark.parametrize("reply", [WRONG, "no code at all", "```python\nimport sys; sys.exit(3)\n```"])
async def test_not_solved_is_zero(make_worker: MakeWorker, model: Any, tmp_path: Path, reply: str) -> None:
    model.reply = reply
    result = await one(make_worker, model, make_task(tmp_path / "t"))
    assert (result.rewards, result.exception_type) == ({"reward": 0.0}, None)


async def test_agent_timeout_still_has_a_verdict(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    model.delay_s = 20.0
    result = await one(make_worker, model, make_task(tmp_path / "t"), agent={"timeout_s": 0.5})
    assert (result.rewards, result.exception_type) == ({"reward": 0.0}, "AgentTimeoutError")
    assert 0.5 <= result.timings.agent_s < 5


@pytest.mark.parametrize(
    ("reply", "exception"), [(500, "InternalServerError"), (404, "BadRequestError")]
)  # fmt: skip
async def test_model_error_has_no_verdict(
    make_worker: MakeWorker, model: Any, tmp_path: Path, reply: int, exception: str
) -> None:
    model.reply = reply
    result = await one(make_worker, model, make_task(tmp_path / "t"))
    assert (result.rewards, result.exception_type) == (None, exception)
    assert Path(result.logs["exception"]).exists()


@pytest.mark.parametrize(
    ("dockerfile", "part"),
    [("FROM x\nRUN exit 9\n", "ended with 9"), ("FROM x\nADD a b\n", "ADD is not supported"), ("", "no FROM")],
)
async def test_build_failure(make_worker: MakeWorker, model: Any, tmp_path: Path, dockerfile: str, part: str) -> None:
    result = await one(make_worker, model, make_task(tmp_path / "t", dockerfile=dockerfile))
    assert (result.rewards, result.exception_type) == (None, "SandboxBuildFailedError")
    assert part in (result.exception_message or "")


async def test_start_timeout(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    result = await one(make_worker, model, make_task(tmp_path / "t"), sandbox={"start_timeout_s": 0.0001})
    assert (result.rewards, result.exception_type) == (None, "EnvironmentStartTimeoutError")


@pytest.mark.parametrize(
    ("test_sh", "exception"),
    [
        ("#!/bin/bash\ntrue\n", "RewardFileNotFoundError"),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", "VerifierOutputParseError"),
        ("#!/bin/bash\necho '{\"a\": 1e999}' > /logs/verifier/reward.json\n", "VerifierOutputParseError"),
        (f"#!/bin/bash\necho '{{\"a\": 1{'0' * 400}}}' > /logs/verifier/reward.json\n", "VerifierOutputParseError"),
        ("#!/bin/bash\n: > /logs/verifier/reward.txt\n", "RewardFileEmptyError"),
    ],
)
async def test_verifier_without_a_number(
    make_worker: MakeWorker, model: Any, tmp_path: Path, test_sh: str, exception: str
) -> None:
    result = await one(make_worker, model, make_task(tmp_path / "t", test_sh=test_sh))
    assert (result.rewards, result.exception_type) == (None, exception)


STEPS_TOML = """version = "1.0"
[verifier]
environment_mode = "separate"
timeout_sec = 30.0
[[steps]]
name = "one"
artifacts = ["/app"]
[[steps]]
name = "two"
artifacts = ["/app"]
"""


def make_steps(folder: Path, *scripts: str) -> Task:
    task = make_task(folder)
    (folder / "task.toml").write_text(STEPS_TOML)
    for name, script in zip(("one", "two"), scripts, strict=True):
        (folder / "steps" / name / "tests").mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text("Write `double(x)`.\n")
        (folder / "steps" / name / "tests" / "test.sh").write_text(f"#!/bin/bash\n{script}\n")
    return task


@pytest.mark.parametrize(
    ("second", "rewards", "exception"),
    [
        ("echo 0 > /logs/verifier/reward.txt", {"reward": 0.5}, None),
        ("sleep 60", None, "VerifierTimeoutError"),
        ("true", None, "RewardFileNotFoundError"),
        ("echo '{}' > /logs/verifier/reward.json", None, None),
    ],
)
async def test_a_step_without_a_verdict_is_not_left_out_of_the_mean(
    make_worker: MakeWorker,
    model: Any,
    tmp_path: Path,
    second: str,
    rewards: dict[str, float] | None,
    exception: str | None,
) -> None:
    task = make_steps(tmp_path / "t", "echo 1 > /logs/verifier/reward.txt", second)
    result = await one(make_worker, model, task, sandbox={"verifier_timeout_s": 2.0})
    assert (result.rewards, result.exception_type) == (rewards, exception)
    assert result.agent_metadata["format_ok"] is True
    assert min(result.timings.agent_s, result.timings.verify_s) > 0


async def test_a_later_step_that_could_not_begin_decides(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    """Late in its first step, which the tests judged; by that alone it would score zero for the sandbox's failure."""
    task = make_steps(tmp_path / "t", "echo 1 > /logs/verifier/reward.txt", "echo 1 > /logs/verifier/reward.txt")
    set_up = task.path / "steps" / "two" / "workdir" / "setup.sh"
    set_up.parent.mkdir()
    set_up.write_text("exit 3\n")
    model.delay_s = 20.0
    result = await one(make_worker, model, task, agent={"timeout_s": 0.5})
    assert (result.rewards, result.exception_type) == (None, "RuntimeError")
    assert str(result.agent_metadata["later_failure"]).startswith("AgentTimeoutError: ")


async def test_an_agent_that_works_when_all_steps_are_out_of_time_is_late(
    make_worker: MakeWorker, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has a timer, and all steps one trial: whoever is slow in both would never be told so."""
    limits = []
    timeout = asyncio.timeout

    def kept(delay: float | None) -> asyncio.Timeout:
        limit = timeout(delay)
        if delay == 600.0:
            limits.append(limit)
        return limit

    monkeypatch.setattr(asyncio, "timeout", kept)
    task = make_steps(tmp_path / "t", "echo 1 > /logs/verifier/reward.txt", "echo 1 > /logs/verifier/reward.txt")
    worker = await make_worker(trial_timeout_s=600.0)
    attempt = asyncio.create_task(worker.run(spec(task), model.url))
    await asyncio.wait_for(model.asked.wait(), 60)
    model.asked.clear()
    model.delay_s = 120.0
    await asyncio.wait_for(model.asked.wait(), 60)  # by the second step
    limits[0].reschedule(asyncio.get_running_loop().time())
    result = await attempt
    assert (result.rewards, result.exception_type) == (None, "AgentTimeoutError")
    assert result.timings.agent_s > 0


async def test_verifier_timeout(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test_sh="#!/bin/bash\nsleep 60\n")
    result = await one(make_worker, model, task, sandbox={"verifier_timeout_s": 0.7})
    assert (result.rewards, result.exception_type) == (None, "VerifierTimeoutError")


async def test_a_timer_that_went_on_while_the_worker_stood_still_is_told(
    make_worker: MakeWorker, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl360.rollout.standstill.Standstill.seconds_since", lambda self, began: 63.0)
    task = make_task(tmp_path / "t", test_sh="#!/bin/bash\nsleep 60\n")
    result = await one(make_worker, model, task, sandbox={"verifier_timeout_s": 0.7})
    assert (result.exception_type, result.agent_metadata["stood_still"]) == ("VerifierTimeoutError", 63.0)


async def test_several_rewards_and_json_beats_text(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    script = (
        '#!/bin/bash\ncd /logs/verifier\necho 0 > reward.txt\necho \'{"correct": 1, "style": 0.5}\' > reward.json\n'
    )
    result = await one(make_worker, model, make_task(tmp_path / "t", test_sh=script))
    assert result.rewards == {"correct": 1.0, "style": 0.5}


async def test_a_killed_sandbox_has_no_verdict(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test_sh="#!/bin/bash\nkill -9 2; sleep 5\n")
    result = await one(make_worker, model, task)
    assert (result.rewards, result.exception_type) == (None, "RuntimeError")


class Breaks:
    """Wraps a made-up Harbor agent that raises the same name as a sandbox that dies under the verifier does."""

    DEFAULT_SETUP_TIMEOUT_SEC = 60.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = LeavesALoop(*args, **kwargs)

        async def run(instruction: str, environment: Any, context: Any) -> None:
            raise RuntimeError("Command timed out after 30 seconds")

        made.run = run
        return made

    name = staticmethod(lambda: "breaks")


async def test_a_sandbox_killed_after_the_agents_own_error_of_the_same_name(
    make_worker: MakeWorker, model: Any, tmp_path: Path
) -> None:
    """The later failure decides. Taken for the agent's own error it would score zero."""
    dies = make_task(tmp_path / "t", test_sh="#!/bin/bash\nkill -9 2; sleep 5\n")
    result = await one(make_worker, model, dies, agent={"import_path": BREAKS_AGENT})
    assert (result.rewards, result.exception_type) == (None, "RuntimeError")
    assert "timed out" not in (result.exception_message or "")
    assert "agent_error" not in result.agent_metadata
    judged = await one(make_worker, model, make_task(tmp_path / "u"), agent={"import_path": BREAKS_AGENT})
    assert (judged.rewards, judged.agent_metadata["agent_error"]) == ({"reward": 0.0}, "RuntimeError")


async def test_lifetime(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test_sh="#!/bin/bash\nsleep 30\n")
    result = await one(make_worker, model, task, sandbox={"lifetime_s": 1.0})
    assert (result.rewards, result.exception_type) == (None, "RuntimeError")
    assert result.agent_metadata["exhausted"] == "lifetime"


async def test_trial_timeout(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    model.delay_s = 30.0
    began = time.monotonic()
    result = await one(make_worker, model, make_task(tmp_path / "t"), trial_timeout_s=1.0)
    assert (result.rewards, result.exception_type) == (None, "TrialTimeoutError")
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("change", "exception"),
    [
        (lambda f: (f / "task.toml").write_text("not toml ["), "TOMLDecodeError"),
        (lambda f: (f / "tests/test.sh").unlink(), "FileNotFoundError"),
        (lambda f: f.rename(f.with_name("elsewhere")), "FileNotFoundError"),
    ],
)
async def test_a_broken_task_is_a_result(
    make_worker: MakeWorker, model: Any, tmp_path: Path, change: Callable[[Path], Any], exception: str
) -> None:
    task = make_task(tmp_path / "t")
    change(task.path)
    result = await one(make_worker, model, task)
    assert (result.rewards, result.exception_type) == (None, exception)


async def test_a_task_that_wants_the_network(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", toml='[environment]\nnetwork_mode = "public"\n')
    result = await one(make_worker, model, task)
    assert (result.rewards, result.exception_type) == (None, "SandboxBuildFailedError")
    assert "sandbox.network" in (result.exception_message or "")


class LeavesALoop:
    """Made into a Harbor agent below: cheats by a process that keeps writing the reward file, and planted files."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from harbor.agents.agent_auth_resolution import ModelConnectionSpec
        from harbor.agents.base import BaseAgent
        from harbor.agents.capabilities import AgentCapabilities

        class Agent(BaseAgent):
            MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
            capabilities = AgentCapabilities(base_url=True)

            @staticmethod
            def name() -> str:
                return "cheater"

            def version(self) -> str:
                return "0"

            async def setup(self, environment: Any) -> None:
                await asyncio.sleep(CHEATER_SETUP_S)

            async def run(self, instruction: str, environment: Any, context: Any) -> None:
                loop = (
                    "while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
                    "echo '{\"reward\": 1}' > /logs/verifier/reward.json; done"
                )
                await environment.exec(f"setsid nohup sh -c '{loop}' >/dev/null 2>&1 & (trap '' TERM; {loop}) &")
                await environment.exec("mkdir -p /tests; echo 'def double(x): return 2 * x' > /tests/solution.py")
                await environment.exec("rm -rf /logs/verifier; ln -s /tmp /logs/verifier")

        return Agent(*args, **kwargs)

    @staticmethod
    def name() -> str:
        return "cheater"


LeavesALoop.DEFAULT_SETUP_TIMEOUT_SEC = 60.0  # type: ignore[attr-defined]


async def test_a_loop_that_writes_the_reward_scores_zero(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t")
    result = await one(make_worker, model, task, agent={"import_path": LOOP_AGENT})
    assert (result.rewards, result.exception_type) == ({"reward": 0.0}, None)
    # An agent's own setup is none of the time that counts against the policy's budget.
    assert result.timings.agent_s < CHEATER_SETUP_S <= result.timings.sandbox_s


async def test_concurrency_is_bounded_and_starts_are_staggered(
    make_worker: MakeWorker, model: Any, tmp_path: Path
) -> None:
    task = make_task(tmp_path / "t")
    worker = await make_worker(max_concurrent=2, start_interval_s=0.1)
    model.delay_s = 0.2
    began = time.monotonic()
    results = await asyncio.gather(*(worker.run(spec(task, i), model.url) for i in range(5)))
    assert [r.rewards for r in results] == [{"reward": 1.0}] * 5
    assert model.most_open <= 2
    assert time.monotonic() - began >= 0.4
    assert results[4].timings.queue_s > results[0].timings.queue_s
    assert len({r.try_id for r in results}) == 5


async def test_loggers_do_not_pile_up(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t")
    worker = await make_worker()
    await worker.run(spec(task, 0), model.url)
    known = len(logging.Logger.manager.loggerDict)
    for i in range(1, 4):
        await worker.run(spec(task, i), model.url)
    assert len(logging.Logger.manager.loggerDict) == known


async def test_a_changed_task_is_read_again(make_worker: MakeWorker, model: Any, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t")
    worker = await make_worker(keep_trial_dirs=True)
    first = await worker.run(spec(task, 0), model.url)
    again = await worker.run(spec(task, 1), model.url)
    (task.path / "tests/check.py").write_text("raise SystemExit(1)\n")
    changed = await worker.run(spec(task, 2), model.url)
    assert [r.rewards for r in (first, again, changed)] == [{"reward": 1.0}, {"reward": 1.0}, {"reward": 0.0}]
    locks = [(r.trial_dir / "lock.json").read_text() for r in (first, again, changed)]
    digests = [lock[lock.index("sha256:") :][:71] for lock in locks]
    assert digests[0] == digests[1] != digests[2]
    assert Path(first.logs["verifier"]).exists()


async def test_a_lock_from_the_cache_is_the_one_harbor_would_write(
    make_worker: MakeWorker, model: Any, tmp_path: Path
) -> None:
    from harbor.models.job.lock import TrialLock, build_trial_lock
    from harbor.models.trial.config import TrialConfig
    from harbor.tasks.client import TaskDownloadResult

    task = make_task(tmp_path / "t")
    worker = await make_worker(keep_trial_dirs=True)
    await worker.run(spec(task, 0), model.url)
    second = await worker.run(spec(task, 1), model.url)
    config = TrialConfig.model_validate_json((second.trial_dir / "config.json").read_text())
    download = TaskDownloadResult(path=task.path, download_time_sec=0, cached=True)
    expected = build_trial_lock(trial_config=config, task_download_result=download)
    assert TrialLock.model_validate_json((second.trial_dir / "lock.json").read_text()) == expected


async def test_cancelling_leaves_nothing(make_worker: MakeWorker, model: Any, cache: Path, tmp_path: Path) -> None:
    model.delay_s = 30.0
    worker = await make_worker(max_concurrent=1)
    task = make_task(tmp_path / "t")
    attempt = asyncio.create_task(worker.run(spec(task), model.url))
    await asyncio.wait_for(model.asked.wait(), 30)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert list((tmp_path / "trials").iterdir()) == []
    model.delay_s = 0.0
    assert (await worker.run(spec(task), model.url)).rewards == {"reward": 1.0}  # its slot is free again


async def test_what_fails_after_an_agent_that_was_late(
    make_worker: MakeWorker, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl360.sandboxes.local import transfer

    def full(root_fd: int, source: str, target: Path) -> list[str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model.delay_s = 20.0
    monkeypatch.setattr(transfer, "download_folder", full)
    result = await one(make_worker, model, make_task(tmp_path / "t"), agent={"timeout_s": 0.5})
    assert (result.rewards, result.exception_type) == (None, "AgentTimeoutError")
    later = str(result.agent_metadata["later_failure"])
    assert later.startswith("DownloadVerifierDirError: ")
    assert DISK_FULL in later


def make_separate_task(folder: Path) -> Task:
    task = make_task(folder)
    text = 'version = "1.0"\nartifacts = ["/app"]\n[verifier]\nenvironment_mode = "separate"\n'
    (folder / "task.toml").write_text(text)
    return task


async def test_what_an_earlier_try_of_that_name_left_is_not_judged(
    make_worker: MakeWorker, model: Any, tmp_path: Path
) -> None:
    """A calibration that was killed or is begun again numbers its tries as before. Harbor adds to a trial's folder."""
    task = make_separate_task(tmp_path / "t")
    worker = await make_worker(keep_trial_dirs=True)
    assert (await worker.run(spec(task), model.url)).rewards == {"reward": 1.0}
    model.reply = "no code at all"
    assert (await worker.run(spec(task), model.url)).rewards == {"reward": 0.0}


async def test_an_artifact_for_which_there_was_no_room_is_no_missing_answer(
    make_worker: MakeWorker, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harbor's separate verifier goes on without it, and its tests find nothing. Room came back before that."""
    from rl360.sandboxes.local import transfer

    download = transfer.download_folder

    def full(root_fd: int, source: str, target: Path) -> list[str]:
        if source == "/app":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return download(root_fd, source, target)

    monkeypatch.setattr(transfer, "download_folder", full)
    result = await one(make_worker, model, make_separate_task(tmp_path / "t"))
    assert result.rewards is None  # not the 0 of an answer that did not come along
    assert (result.exception_type, DISK_FULL in (result.exception_message or "")) == ("SandboxDied", True)

    silent = make_separate_task(tmp_path / "silent")
    script = "#!/bin/bash\ncd /app && test -f solution.py && echo 1 > /logs/verifier/reward.txt\n"
    (silent.path / "tests" / "test.sh").write_text(script)
    result = await one(make_worker, model, silent)
    assert result.exception_type == "SandboxDied"  # nor its tests, which write nothing without an answer


async def test_a_separate_verifiers_sandbox_that_was_interrupted_gives_no_verdict(
    make_worker: MakeWorker, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harbor makes it, stops it and forgets it."""
    from rl360.sandboxes.local import LocalSandbox

    task = make_separate_task(tmp_path / "t")
    stop = LocalSandbox.stop

    async def killed_before(self: LocalSandbox, delete: bool) -> None:
        if "__verifier__" in self.session_id and self._sandbox is not None:
            for monitor in psutil.Process(self._sandbox._keeper._process.pid).children():
                monitor.kill()
        await stop(self, delete)

    assert (await one(make_worker, model, task)).rewards == {"reward": 1.0}
    monkeypatch.setattr(LocalSandbox, "stop", killed_before)
    result = await one(make_worker, model, task)
    assert result.agent_metadata["interrupted"] == "signal 9 from outside"
