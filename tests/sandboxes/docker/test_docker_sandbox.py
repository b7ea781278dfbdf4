"""What is Docker's alone, with a real daemon: leftovers of a killed run, memory, offline images, a whole trial."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities

from tests.sandboxes.contract.backends import Backend, new_sandbox
from tests.sandboxes.contract.conftest import docker_image  # noqa: F401

pytestmark = pytest.mark.docker
OURS = "--filter", "label=rl360.run=contract"


def sandbox(image: str, folder: Path, dockerfile: str = "FROM x\nWORKDIR /app\n", **fields: Any) -> Any:
    from rl360.sandboxes.docker import DockerSandbox

    task, files = fields.pop("task", {}), fields.pop("files", {})
    return new_sandbox(Backend("docker", DockerSandbox, {"base": image}), folder, dockerfile, task, files, fields)


def docker(*arguments: str) -> list[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.split()


RUN_AND_WAIT = """
import asyncio, sys
from pathlib import Path
from tests.sandboxes.docker.test_docker_sandbox import sandbox

async def main():
    await sandbox(sys.argv[1], Path(sys.argv[2])).start(force_build=False)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_what_a_killed_run_left_goes_at_the_next_start(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    command = [sys.executable, "-c", RUN_AND_WAIT, docker_image, str(tmp_path / "killed")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    killed = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=env)
    assert killed.stdout is not None
    assert await killed.stdout.readline() == b"started\n"
    mine = sandbox(docker_image, tmp_path / "mine")
    await mine.start(force_build=False)  # the other one is alive
    assert len(docker("ps", "-q", *OURS)) == 2
    killed.send_signal(signal.SIGKILL)
    await killed.wait()

    from rl360.sandboxes.docker import leftovers

    assert await leftovers.sweep() == 1
    assert [c[:12] for c in docker("ps", "-aq", "--no-trunc", *OURS)] == [mine._container.id[:12]]
    await mine.stop(delete=True)
    assert docker("ps", "-aq", *OURS) == []


async def test_start_and_stop_are_quick_and_leave_nothing(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    first = sandbox(docker_image, tmp_path / "first")
    await first.start(force_build=False)  # builds
    await first.stop(delete=True)
    before = {kind: sorted(docker(kind, "ls", "-q")) for kind in ("network", "volume", "image")}
    began = time.monotonic()
    s = sandbox(docker_image, tmp_path / "second")
    await s.start(force_build=False)
    await s.exec("sleep 100 & echo x")
    middle = time.monotonic()
    await s.stop(delete=True)
    assert middle - began < 10
    assert time.monotonic() - middle < 5
    assert docker("ps", "-aq", *OURS) == []
    assert {kind: sorted(docker(kind, "ls", "-q")) for kind in ("network", "volume", "image")} == before


async def test_eight_at_once(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    async def one(number: int) -> str | None:
        s = sandbox(docker_image, tmp_path / f"s{number}")
        try:
            await s.start(force_build=False)
            return (await s.exec(f"echo {number}")).stdout
        finally:
            await s.stop(delete=True)

    assert await asyncio.gather(*(one(n) for n in range(8))) == [f"{n}\n" for n in range(8)]


async def test_a_start_that_is_cancelled_leaves_nothing(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    for delay in (0.1, 0.4, 0.7):
        s = sandbox(docker_image, tmp_path / f"s{delay}")
        starting = asyncio.create_task(s.start(force_build=False))
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.sleep(0.5)  # the daemon ends what it had begun
        await s.stop(delete=True)
    assert docker("ps", "-aq", *OURS) == []


async def test_no_registry_is_asked(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    s = sandbox(docker_image, tmp_path / "a", "# syntax=docker/dockerfile:1\nFROM a:1 AS one\nFROM one\nRUN true\n")
    began = time.monotonic()
    await s.start(force_build=True)
    assert time.monotonic() - began < 30
    await s.stop(delete=True)
    missing = sandbox("no-such-image:1", tmp_path / "b")
    with pytest.raises(Exception, match=r"sandbox\.base: no image no-such-image:1") as error:
        await missing.start(force_build=False)
    assert type(error.value).__name__ == "SandboxBuildFailedError"
    await missing.stop(delete=True)


async def test_a_killed_container_is_a_runtime_error(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    s = sandbox(docker_image, tmp_path / "a")
    await s.start(force_build=False)
    docker("kill", s._container.id)
    with pytest.raises(RuntimeError, match="sandbox ended"):
        await s.exec("true")
    with pytest.raises(RuntimeError, match="not running"):
        await s.upload_file(Path(__file__), "/app/x")


class Solves(BaseAgent):
    """Runs the task's solution."""

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    @staticmethod
    def name() -> str:
        return "solves"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec(instruction, timeout_sec=30)


def make_task(folder: Path, solution: str) -> Any:
    from rl360.types import Task

    files = {
        "instruction.md": solution,
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n',
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
        "tests/test.sh": '#!/bin/bash\npython3 /tests/check.py; echo "$((1 - $?))" > /logs/verifier/reward.txt\n',
        "tests/check.py": "import sys\nsys.path.insert(0, '/app')\nfrom s import double\nassert double(3) == 6\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Task(folder.name, folder, ("test",), "")


@pytest.mark.parametrize("swaps", [True, False], ids=["in a new container", "in Harbor's separate environment"])
@pytest.mark.parametrize(
    ("solution", "reward"),
    [
        ("echo 'double = lambda x: 2 * x' > /app/s.py\n", 1.0),
        ("echo 'double = lambda x: x' > /app/s.py\n", 0.0),
        ("(while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &\nsleep 0.2\n", 0.0),
        ("printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3\n", 0.0),
    ],
    ids=["oracle", "wrong", "a loop writes the reward", "another python"],
)
async def test_a_whole_trial(docker_image: str, tmp_path: Path, solution: str, reward: float, swaps: bool) -> None:  # noqa: F811
    from dataclasses import asdict

    from rl360.config.schemas import AgentConfig, SandboxConfig
    from rl360.rollout.harbor_trial import TaskCache
    from rl360.rollout.trial_worker import TrialWorker
    from rl360.types import AttemptSpec, Sampling

    agent = asdict(AgentConfig(import_path=f"{__name__}:Solves", timeout_s=60.0))
    config = asdict(SandboxConfig(import_path="rl360.sandboxes.docker:DockerSandbox", kwargs={"base": docker_image}))
    worker = TrialWorker(
        agent=agent, sandbox=config, cache_dir=tmp_path / "cache", trials_dir=tmp_path / "trials",
        trial_timeout_s=120.0, model_name="m", max_concurrent=4, start_interval_s=0.0, run_id="contract",
    )  # fmt: skip
    await worker.start()
    worker._tasks = TaskCache(swaps=swaps)
    task = make_task(tmp_path / "task", solution)
    result = await worker.run(AttemptSpec("a0", "g0", 0, task, Sampling(), 1), "http://127.0.0.1:1")
    await worker.close()
    assert (result.exception_type, result.exception_message) == (None, None)
    assert result.rewards == {"reward": reward}
    assert docker("ps", "-aq", "--filter", "label=rl360.owner") == []


async def test_a_task_with_services(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    compose = f"""
services:
  main: {{}}
  other:
    image: {docker_image}
    command: ["python3", "-c", "import socket; s = socket.create_server(('', 80)); s.accept()[0].send(b'served')"]
"""
    s = sandbox(docker_image, tmp_path / "a", files={"docker-compose.yaml": compose})
    await s.start(force_build=False)
    served = await s.exec("exec 3<>/dev/tcp/other/80; cat <&3")
    assert served.stdout == "served"
    assert (await s.exec("timeout 3 bash -c 'exec 3<>/dev/tcp/192.0.2.1/80'")).return_code != 0
    await s.stop(delete=True)
    assert docker("ps", "-aq", *OURS) == []
    assert docker("network", "ls", "-q", *OURS) == []
