"""Every contract test runs on each backend. Docker's needs a daemon and a base image: scripts/docker_for_tests.sh."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.sandboxes.contract.backends import Backend, new_sandbox
from tests.sandboxes.contract.daytona_standin import KEY, StandIn, over_local_sandboxes

Start = Callable[..., Awaitable[Any]]
KEY_VARIABLE = "RL360_TEST_DAYTONA_KEY"
BASE_IMAGE = os.environ.get("RL360_TEST_DOCKER_IMAGE", "rl360-test-base:2")


@pytest.fixture(scope="session")
def docker_image() -> str:
    """An image with bash and python3 at the daemon."""
    done = subprocess.run(["docker", "image", "inspect", BASE_IMAGE], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no image {BASE_IMAGE} at the daemon; run scripts/docker_for_tests.sh")
    return BASE_IMAGE


def _local(cache: Path) -> Backend:
    from rl360.sandboxes.local import LocalSandbox, cgroups

    limits = {"disk", "lifetime"} | ({"memory", "pids"} & set(cgroups.find().parents))
    return Backend("local", LocalSandbox, {"cache_dir": cache}, has_users=os.getuid() == 0, limits=frozenset(limits))


def _docker(image: str) -> Backend:
    from rl360.sandboxes.docker import DockerSandbox

    return Backend("docker", DockerSandbox, {"base": image}, limits=frozenset({"memory", "pids", "disk", "lifetime"}))


def _daytona(standin: StandIn, cache: Path) -> Backend:
    from rl360.sandboxes.daytona import DaytonaSandbox

    fields = {"api_url": f"{standin.url}/api", "api_key_env": KEY_VARIABLE, "cache_dir": cache, "patience_s": 5.0}
    return Backend(
        "daytona", DaytonaSandbox, fields, has_users=os.getuid() == 0, isolates=False, shares_with_verifier=False,
        has_contexts=False,
    )  # fmt: skip


@asynccontextmanager
async def _standin(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StandIn]:
    from rl360.sandboxes.daytona import client
    from rl360.sandboxes.local import host

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder.mkdir()
    async with StandIn(folder, over_local_sandboxes(cache)).serve() as server:
        yield server
        await client.close()
    host.close_hosts()


@pytest_asyncio.fixture
async def standin(tmp_path: Path, sandbox_cache: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StandIn]:
    async with _standin(tmp_path / "standin", sandbox_cache, monkeypatch) as server:
        yield server


BACKENDS = [
    pytest.param("local", marks=pytest.mark.sandbox),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("daytona", marks=pytest.mark.sandbox),
]


@pytest_asyncio.fixture(params=BACKENDS)
async def backend(
    request: pytest.FixtureRequest, tmp_path: Path, sandbox_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Backend]:
    if request.param == "local":
        yield _local(sandbox_cache)
    elif request.param == "docker":
        yield _docker(request.getfixturevalue("docker_image"))
    else:
        async with _standin(tmp_path / "standin", sandbox_cache, monkeypatch) as server:
            yield _daytona(server, sandbox_cache)


@pytest_asyncio.fixture
async def start(backend: Backend, tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(dockerfile=..., task={...}, files={...}, **SandboxConfig fields)`; stopped at the end."""
    started: list[Any] = []

    async def begin(
        dockerfile: str = "FROM x\nWORKDIR /app\n",
        task: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        **fields: Any,
    ) -> Any:
        sandbox = new_sandbox(backend, tmp_path / f"s{len(started)}", dockerfile, task or {}, files or {}, fields)
        started.append(sandbox)
        await sandbox.start(force_build=False)
        return sandbox

    yield begin
    for sandbox in started:
        await sandbox.stop(delete=True)
    if backend.name == "local":
        from rl360.sandboxes.local import host

        host.close_hosts()
