"""Where the verifier runs, from what a task says."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("HARBOR_TELEMETRY", "0")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from harbor.models.task.config import TaskConfig
from harbor.trial.hooks import TrialEvent

from rl360.rollout import verification


def config(text: str) -> TaskConfig:
    return TaskConfig.model_validate_toml(text)


STEPS = '[[steps]]\nname = "one"\n'
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
SHARED = '[verifier]\nenvironment_mode = "shared"\n'


@pytest.mark.parametrize(
    ("text", "fine"), [("", True), (SHARED, True), (STEPS, False), (STEPS + SHARED, False), (STEPS + SEPARATE, True)]
)
def test_steps_need_a_separate_verifier(text: str, fine: bool) -> None:
    if fine:
        verification.check(config(text))
        return
    with pytest.raises(verification.UnsupportedTaskError, match="environment_mode"):
        verification.check(config(text))


@pytest.mark.parametrize(
    ("text", "dockerfile", "mode", "artifacts"),
    [
        ("", "FROM x\nWORKDIR /a\nRUN ls\nworkdir /srv/app\n", "separate", ["/srv/app"]),
        ("", "FROM x\n", "separate", ["/app"]),
        ("", "FROM x\nWORKDIR $HOME\n", "separate", ["/app"]),
        ('[environment]\nworkdir = "/w"\n', "FROM x\nWORKDIR /a\n", "separate", ["/w"]),
        ('artifacts = ["/app/", "/out"]\n', "FROM x\nWORKDIR /app\n", "separate", ["/app/", "/out"]),
        ('artifacts = ["/out"]\n', "FROM x\nWORKDIR /app\n", "separate", ["/app", "/out"]),
        (SHARED, "FROM x\nWORKDIR /app\n", "shared", []),
        (SEPARATE, "FROM x\nWORKDIR /app\n", "separate", []),
    ],
)
def test_harbors_separate_mode_is_the_default_elsewhere(
    text: str, dockerfile: str, mode: str, artifacts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/Dockerfile").write_text(dockerfile)
    changed = verification.separated(config(text), tmp_path)
    assert changed.verifier.environment_mode is not None
    assert changed.verifier.environment_mode.value == mode
    assert [a if isinstance(a, str) else a.source for a in changed.artifacts] == artifacts


class Environment:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.dead = False
        self.exhausted = ""

    async def settle_for_verifier(self, user: Any) -> None:
        self.calls.append(("settle", user))

    async def exec(self, command: str, **_: Any) -> None:
        if self.dead:
            raise RuntimeError("the sandbox is not running")

    async def service_download_dir(self, error: Exception) -> None:
        raise error

    service_is_dir = service_download_file = service_download_dir_with_exclusions = service_download_dir


class Swapping(Environment):
    async def start_afresh(self, declared: Any, user: Any) -> None:
        self.calls.append(("afresh", [(a.path, a.exclude) for a in declared], user))


def trial(text: str, environment: Environment) -> Any:
    hooks: list[Any] = []
    return SimpleNamespace(
        task=SimpleNamespace(config=config(text)),
        agent_environment=environment,
        _separate_verifier_env=None,
        add_hook=lambda event, hook: hooks.append((event, hook)),
        hooks=hooks,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("afresh", [], None)]),
        (
            'artifacts = ["/out", {source = "/log", exclude = ["*.gz"]}]\n[verifier]\nuser = "nobody"\n',
            [("afresh", [("/out", ()), ("/log", ("*.gz",))], "nobody")],
        ),
        (SHARED, [("settle", None)]),
    ],
)
async def test_hooks(text: str, expected: list[Any]) -> None:
    environment = Swapping()
    made = trial(text, environment)
    verification.isolate(made)
    ((event, hook),) = made.hooks
    assert event is TrialEvent.VERIFICATION_START
    await hook(None)
    assert environment.calls == expected


def test_separate_needs_no_hook_and_an_environment_that_cannot_change_over_is_refused() -> None:
    made = trial(SEPARATE, Environment())
    assert verification.isolate(made) is not None
    assert made.hooks == []
    with pytest.raises(verification.UnsupportedTaskError, match="where the agent worked"):
        verification.isolate(trial("", Environment()))


class DaytonaError(Exception):
    """One of the failure table's names."""


@pytest.mark.parametrize(
    ("error", "dead", "exhausted", "counts"),
    [
        (RuntimeError("file transfer failed: No such file or directory"), False, "", False),  # the agent removed it
        (RuntimeError("file transfer failed"), True, "", True),
        (RuntimeError("file transfer failed"), True, "memory", False),
        (DaytonaError("502"), False, "", True),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False, "", True),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), False, "", False),
    ],
)
async def test_an_artifact_that_failed_to_come_along(
    error: Exception, dead: bool, exhausted: str, counts: bool
) -> None:
    """Harbor goes on without it, and its tests judge an answer that is not there."""
    environment = Environment()
    watch = verification.isolate(trial(SEPARATE, environment))
    assert watch is not None
    environment.dead, environment.exhausted = dead, exhausted
    with pytest.raises(type(error)):
        await environment.service_download_dir(error)
    assert (watch.failed is error) is counts
