"""A container that ended before we ended it, and a daemon that fails while artifacts are read. No daemon."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl360.sandboxes.artifact_paths import Artifact
from rl360.sandboxes.docker import DockerSandbox, environment
from rl360.sandboxes.docker.afresh import collect
from rl360.sandboxes.docker.client import DockerError, Done
from rl360.sandboxes.docker.container import Container as RealContainer
from rl360.sandboxes.docker.container import State
from rl360.sandboxes.docker.environment import RuntimeRequestError
from tests.sandboxes.docker.test_abilities import fake_docker


class Container:
    def __init__(self, state: State | None):
        self._state = state

    async def state(self) -> State:
        if self._state is None:
            raise TimeoutError
        return self._state


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State(True), ("", "")),
        (State(False, exit_code=137), ("", "the container had ended with 137")),
        (State(False, out_of_memory=True, exit_code=137), ("memory", "")),
        (State(False, exit_code=0), ("lifetime", "")),
        (State(False, exit_code=3), ("sandbox", "")),
        (None, ("", "the docker daemon does not say whether it had ended")),
    ],
)
async def test_how_it_ended(state: State | None, expected: tuple[str, str]) -> None:
    """Files of a dead container can still be read, so a verdict says nothing of how the tests ended."""
    sandbox: Any = DockerSandbox.__new__(DockerSandbox)
    sandbox.exhausted = sandbox.interrupted = ""
    sandbox._container, sandbox._scratch, sandbox._overlay = Container(state), None, None
    sandbox._mounts_compose_path = sandbox._env_compose_path = None
    sandbox._mounts_compose_temp_dir = sandbox._env_compose_temp_dir = None
    sandbox._project, sandbox._has_services = "test", False
    sandbox.logger = SimpleNamespace(warning=lambda *_: None)
    await sandbox.stop(delete=True)
    assert (sandbox.exhausted, sandbox.interrupted) == expected


MISSING = "echo Error response from daemon: Could not find the file /app in container c >&2; exit 1"
NO_FILES = "echo Error response from daemon: tar error on re-exec cmd: pipe2: too many open files >&2; exit 1"
LOOP = "echo Error response from daemon: evalSymlinksInScope: too many links in /d/app >&2; exit 1"
NAMED_SO = "echo Could not find the file /no space left on device in container c >&2; exit 1"
DOWN = "echo Cannot connect to the Docker daemon at unix:///var/run/docker.sock >&2; exit 1"


@pytest.mark.parametrize(
    ("cp", "inspect", "gone"),
    [
        pytest.param(MISSING, "exit 0", True, id="removed"),
        pytest.param(LOOP, "exit 0", True, id="a link to itself"),
        pytest.param(NAMED_SO, "exit 0", True, id="a link to a name that reads like an error"),
        pytest.param(DOWN, DOWN, False, id="daemon down"),
        pytest.param(DOWN, "exit 0", False, id="daemon down for a moment"),
        pytest.param(NO_FILES, "exit 0", False, id="daemon out of descriptors"),  # it still answers what is small
    ],
)
async def test_a_daemon_that_fails_is_not_an_agent_that_removed_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cp: str, inspect: str, gone: bool
) -> None:
    fake_docker(tmp_path, monkeypatch, f"case $1 in cp) {cp} ;; inspect) {inspect} ;; esac")
    artifacts = [Artifact("/app", required=True)]
    if gone:
        (one,) = await collect("c", artifacts, tmp_path, 1000)
        assert one.archive is None
        return
    with pytest.raises(DockerError, match=r"Cannot connect|too many open files"):
        await collect("c", artifacts, tmp_path, 1000)


async def test_an_artifact_that_the_daemon_could_not_read_is_no_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harbor's separate verifier goes on without what cannot be downloaded; the name says whose failure it was."""
    fake_docker(tmp_path, monkeypatch, f"case $1 in cp) {NO_FILES} ;; inspect) echo true false 0 ;; esac")
    sandbox: Any = DockerSandbox.__new__(DockerSandbox)
    sandbox._container, sandbox._image_workdir = RealContainer("c", tmp_path), "/app"
    sandbox.task_env_config = SimpleNamespace(workdir=None)
    with pytest.raises(RuntimeRequestError, match="too many open files"):
        await sandbox.download_dir("/app", tmp_path / "there")


@pytest.mark.parametrize("bash", ["hangs", "fails", "answers"])
async def test_a_killed_command_in_a_container_that_goes_on_is_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bash: str
) -> None:
    """A policy that gave the sandbox a bash without an end, and killed its own shell, had its tries made again: the
    daemon was said not to answer."""
    monkeypatch.setattr(environment, "ANSWER_S", 0.5)
    does = {"hangs": "exec sleep 100", "fails": "exit 1", "answers": "exit 0"}[bash]
    fake_docker(tmp_path, monkeypatch, f'case "$*" in *"bash -c true") {does} ;; inspect*) echo true false 0 ;; esac')
    sandbox: Any = DockerSandbox.__new__(DockerSandbox)
    sandbox._container = RealContainer("c", tmp_path)
    await sandbox._explain(Done(137, "", ""), None)
    assert sandbox._container is not None
