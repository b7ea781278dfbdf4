"""What is Docker's alone, with a real daemon: leftovers of a killed run, memory, offline images, a whole trial."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.contract.backends import Backend, new_sandbox
from tests.sandboxes.contract.conftest import docker_image  # noqa: F401
from tests.sandboxes.contract.trials import SOLUTIONS, trial

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
    assert middle - began < 20
    assert time.monotonic() - middle < 9  # Docker gives 10 s to what it does not kill at once
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


@pytest.mark.parametrize("who", ["inside", "inside, its first processes", "outside"])
async def test_who_ended_it(docker_image: str, tmp_path: Path, who: str) -> None:  # noqa: F811
    """A policy that could end its container as a failure does would never be told that its answer is wrong."""
    s = sandbox(docker_image, tmp_path / "a")
    await s.start(force_build=False)
    container = s._container.id
    if who == "outside":
        docker("kill", container)
    else:
        command = "kill -9 -1" if who == "inside" else "kill 1; kill -INT 1; pkill -9 -x sleep"
        with suppress(RuntimeError):
            await s.exec(command)
        docker("wait", container) if s._container is not None else None
    await s.stop(delete=True)
    expected = ("", "the container had ended with 137") if who == "outside" else ("sandbox", "")
    assert (s.exhausted, s.interrupted) == expected


@pytest.mark.parametrize("swaps", [True, False], ids=["in a new container", "in Harbor's separate environment"])
@pytest.mark.parametrize(("solution", "reward"), SOLUTIONS)
async def test_a_whole_trial(docker_image: str, tmp_path: Path, solution: str, reward: float, swaps: bool) -> None:  # noqa: F811
    from rl360.rollout.harbor_trial import TaskCache

    result = await trial(
        "rl360.sandboxes.docker:DockerSandbox", {"base": docker_image}, tmp_path, solution, TaskCache(swaps)
    )
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
