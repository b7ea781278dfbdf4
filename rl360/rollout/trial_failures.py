"""What failed in a Harbor trial, in the order in which it did, and by which of it the trial is known.

In: a Harbor trial before it begins, and its steps' records afterwards. Out: a `Failure` for each thing that was raised,
the first one or the one that decides, and the one of the others that says most. Left to others: what they mean for
training (failures.py).

Harbor keeps the first failure of a trial. Where that is the policy's own end, the trial went on to the tests or to its
next step, and what failed there has to be known too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl360.rollout.failures import EXCEPTIONS, TIMERS, Action, is_under_it
from rl360.rollout.steps import watch_steps

if TYPE_CHECKING:
    from harbor.models.trial.result import StepResult
    from harbor.models.trial.result import TrialResult as HarborResult
    from harbor.trial.trial import Trial


class Failure(NamedTuple):
    """What was raised. hosts: because this machine was at its end."""

    name: str
    message: str
    hosts: bool = False

    @property
    def is_policys(self) -> bool:
        row = EXCEPTIONS.get(self.name)
        return row is not None and row.policy is not None

    @property
    def is_tasks(self) -> bool:
        """Of its tests or its settings: another try would meet it again."""
        row = EXCEPTIONS.get(self.name)
        return row is not None and row.action is Action.MASK


def remember_failures(trial: Trial) -> list[Failure]:
    """A list that gets every failure as the trial records it."""
    from rl360.agents.blame import hosts_failure  # imports Harbor, which wants its environment first

    failures: list[Failure] = []
    record = trial._record_exception

    def remember(error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            return  # whoever cancels it knows why
        hosts = hosts_failure(error, trial.agent_environment)
        failures.append(Failure(type(error).__name__, _whole_message(error), hosts))

    def remembering(error: BaseException) -> None:
        remember(error)
        record(error)

    trial._record_exception = remembering
    watch_steps(trial, remember)
    return failures


def _whole_message(error: BaseException) -> str:
    """With what it was raised from: Harbor's own errors of transfers say only that there was one."""
    said = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        said.append(str(error))
    return ": ".join(said)


def in_order(recorded: Sequence[Failure], harbor: HarborResult, lost: Failure | None) -> list[Failure]:
    """All of them. `lost`: an artifact that did not come along, before the tests that then missed it."""
    steps = harbor.step_results or []
    found = list(recorded)
    if not found and harbor.exception_info is not None:
        found.append(Failure(harbor.exception_info.exception_type, harbor.exception_info.exception_message))
    found += _before_agents(steps)
    if lost is not None:
        found.insert(next((i for i, one in enumerate(found) if one.is_tasks), len(found)), lost)
    return found


def _before_agents(steps: Sequence[StepResult]) -> list[Failure]:
    """Of steps whose set-up or health check failed, which Harbor only writes down. Such a step is the last."""
    return [
        Failure(step.exception_info.exception_type, step.exception_info.exception_message)
        for step in steps
        if step.exception_info is not None and step.agent_execution is None
    ]


def deciding(failures: Sequence[Failure], has_steps: bool) -> tuple[Failure | None, Failure | None]:
    """The failure that a trial is known by, and the one of the others that says most; None where there is none.

    Of a trial with steps, an end of the policy's in one step says nothing of what then failed under it in another.
    """
    if not failures:
        return None, None
    index = 0
    if has_steps and failures[0].is_policys:
        index = _first(failures, _is_under_it, lambda one: one.is_policys and one.name in TIMERS)
    others = [*failures[:index], *failures[index + 1 :]]
    return failures[index], others[_first(others, _is_under_it, lambda one: one.name in TIMERS)] if others else None


def _is_under_it(failure: Failure) -> bool:
    return is_under_it(failure.name)


def _first(failures: Sequence[Failure], *wanted: Callable[[Failure], bool]) -> int:
    """Index of the first that is wanted most, or of the first of all."""
    for is_wanted in wanted:
        if (index := next((i for i, one in enumerate(failures) if is_wanted(one)), None)) is not None:
            return index
    return 0
