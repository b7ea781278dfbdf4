"""What an agent raises, with what led to it and with the sandbox as it then is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl360.rollout.agent_watch import AgentWatch, is_agents_own


def named(name: str, base: type[Exception] = Exception, text: str = "x") -> Exception:
    return type(name, (base,), {})(text)


def raised(error: Exception, cause: Exception | None = None, while_handling: Exception | None = None) -> Exception:
    try:
        if while_handling is None:
            raise error from cause
        try:
            raise while_handling
        except Exception:
            raise error  # noqa: B904 (a context without a cause is the case)
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        KeyError("arguments"),
        RecursionError("maximum recursion depth exceeded"),
        RuntimeError("Command timed out after 30 seconds"),
        raised(RuntimeError("Command timed out"), cause=TimeoutError()),
        named("NonZeroAgentExitCodeError", RuntimeError),
        named("ApiRateLimitError", type("NonZeroAgentExitCodeError", (RuntimeError,), {})),  # printed, not raised
        named("BadRequestError", type("APIStatusError", (Exception,), {})),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
        FileNotFoundError("/logs/agent/trajectory.json"),
        ExceptionGroup("tasks", [KeyError("x"), ValueError("y")]),
        named("NeverSeenError"),
        named("NonZeroAgentExitCodeError", RuntimeError, "stdout: No space left on device"),  # printed, not raised
        OSError(7, "Argument list too long"),
    ],
    ids=repr,
)
def test_errors_of_the_agents_own(error: Exception) -> None:
    assert is_agents_own(error)


@pytest.mark.parametrize(
    "error",
    [
        named("InternalServerError", RuntimeError),
        named("RateLimitError", type("APIStatusError", (Exception,), {})),
        ConnectionResetError("reset by peer"),
        TimeoutError(),
        MemoryError(),
        ImportError("no module"),
        named("AuthenticationError", type("APIStatusError", (Exception,), {})),
        named("MyOwnConnectionError", type("APIConnectionError", (Exception,), {})),
        raised(named("RetryError"), cause=named("APIConnectionError")),
        raised(KeyError("choices"), while_handling=named("InternalServerError")),
        raised(RuntimeError("sandbox ended"), cause=named("SandboxDied", RuntimeError)),
        ExceptionGroup("tasks", [KeyError("x"), named("DaytonaConnectionError")]),
    ],
    ids=repr,
)
def test_failures_of_what_is_under_it(error: Exception) -> None:
    assert not is_agents_own(error)


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    one, two = KeyError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert is_agents_own(one)


class Sandbox:
    def __init__(self, answers: bool) -> None:
        self.answers, self.asked = answers, 0

    async def exec(self, command: str, **_: Any) -> None:
        self.asked += 1
        if not self.answers:
            raise RuntimeError("the sandbox is not running")


class Agent:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        if self.error is not None:
            raise self.error

    async def resume(self, instruction: str, environment: Any, context: Any) -> None:
        raise ValueError("second step")


def watched(error: BaseException | None, folder: Path, answers: bool = True) -> tuple[Any, AgentWatch]:
    trial: Any = SimpleNamespace(
        agent=Agent(error),
        agent_environment=Sandbox(answers),
        config=SimpleNamespace(trial_name="t"),
        paths=SimpleNamespace(exception_message_path=folder / "exception.txt"),
    )
    return trial, AgentWatch(trial)


ARGUMENTS: dict[str, Any] = {"instruction": "go", "environment": None, "context": None}


async def test_an_agents_own_error_lets_the_trial_go_on(tmp_path: Path) -> None:
    trial, watch = watched(KeyError("arguments"), tmp_path)
    await trial.agent.run(**ARGUMENTS)
    assert isinstance(watch.error, KeyError)
    assert "KeyError: 'arguments'" in (tmp_path / "exception.txt").read_text()
    await trial.agent.resume(**ARGUMENTS)
    assert isinstance(watch.error, ValueError)


async def test_an_agent_that_returns_has_no_error(tmp_path: Path) -> None:
    trial, watch = watched(None, tmp_path)
    await trial.agent.run(**ARGUMENTS)
    assert (watch.error, trial.agent_environment.asked) == (None, 0)


@pytest.mark.parametrize(
    ("error", "answers", "asked"),
    [
        (KeyError("arguments"), False, 2),  # as its user and as root
        (named("InternalServerError"), True, 0),
        (OSError(28, "No space left on device"), True, 0),
        (raised(RuntimeError("the log was not written"), cause=OSError(24, "Too many open files")), True, 0),
        (asyncio.CancelledError(), True, 0),
    ],
)
async def test_everything_else_is_raised(tmp_path: Path, error: BaseException, answers: bool, asked: int) -> None:
    trial, watch = watched(error, tmp_path, answers)
    with pytest.raises(type(error)):
        await trial.agent.run(**ARGUMENTS)
    assert (watch.error, trial.agent_environment.asked) == (None, asked)
