"""Errors of a host at its end, told apart from what a policy can bring about."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl360.agents.bash import BashAgent
from rl360.agents.blame import hosts_failure
from tests.agents.kit import LocalEnvironment, Result, attempt


def raised(error: Exception, cause: Exception | None = None, while_handling: Exception | None = None) -> Exception:
    error.__context__ = while_handling
    if cause is not None:
        error.__cause__ = cause
    return error


HEALTHY, FULL = SimpleNamespace(exhausted=""), SimpleNamespace(exhausted="disk")
DISK = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "error",
    [
        DISK,
        OSError(24, "Too many open files"),
        MemoryError(),
        raised(RuntimeError("the log was not written"), cause=DISK),
        raised(ValueError("no child"), while_handling=BlockingIOError(11, "Resource temporarily unavailable")),
        ExceptionGroup("tasks", [KeyError("x"), OSError(5, "Input/output error")]),
    ],
    ids=repr,
)
def test_a_host_at_its_end(error: Exception) -> None:
    assert hosts_failure(error, HEALTHY)
    assert hosts_failure(error, object())  # an environment of somebody else's
    assert not hosts_failure(error, FULL)  # the policy filled its own sandbox, and a file could not be written into it


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("ended with 1: cp: write error: No space left on device"),  # printed, not raised
        OSError(7, "Argument list too long"),
        FileNotFoundError(2, "No such file or directory"),
        OSError("without a number"),
        KeyError("arguments"),
    ],
    ids=repr,
)
def test_what_a_policy_can_bring_about(error: Exception) -> None:
    assert not hosts_failure(error, HEALTHY)


class OnAFullHost(LocalEnvironment):
    """Answers, but the machine that it is on has no room for what the agent's program wants to write."""

    async def exec(self, command: str, timeout_sec: int | None = None, **more: Any) -> Result:
        if command == "true":
            return await super().exec(command, timeout_sec, **more)
        raise RuntimeError("the output was not kept") from DISK


async def test_a_full_host_is_no_tool_that_refused(tmp_path: Path) -> None:
    """Answered as one it would end the attempt as given up, and the policy would be scored for it."""
    environment = OnAFullHost(tmp_path / "sandbox")
    with pytest.raises(RuntimeError, match="not kept"):
        await attempt(BashAgent, tmp_path, [[("bash", {"command": "ls"})]], environment=environment)
