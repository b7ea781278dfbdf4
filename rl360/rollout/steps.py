"""What a Harbor trial of several steps keeps to itself: its steps' failures, verdicts, timings and metadata.

In: Harbor's trial before it begins, and its result afterwards. Out: every failure as it is raised, and the steps'
records as those of one trial. Left to others: what they mean (trial_worker.py, failures.py).

Harbor catches what a step raises, and leaves a step without a verdict out of the mean: tests that hang would raise the
reward. Here such a trial has no verdict at all. Steps that `min_reward` kept from beginning are left out, as the task
says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harbor.models.trial.result import StepResult
    from harbor.trial.trial import Trial

OUT_OF_TIME = "the trial's time was up while its agent worked"  # the message of such a failure
_AGENT, _TESTS = "_run_agent_phase", "_run_separate_verifier"  # of a step; tests in the agent's sandbox are refused


class AgentTimeoutError(TimeoutError):
    """Harbor's name and meaning, for what no timer of Harbor's sees: each step has one, and all steps one trial."""


def watch_steps(trial: Trial, remember: Callable[[BaseException], None]) -> None:
    """Tell `remember` what the phases of a trial's steps raise. Of a trial of one step, Harbor tells."""
    if not trial.task.has_steps:
        return
    for name in (_AGENT, _TESTS):
        setattr(trial, name, _watched(getattr(trial, name), remember, name == _AGENT))


def _watched(phase: Callable[..., Any], remember: Callable[[BaseException], None], agents: bool) -> Callable[..., Any]:
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return await phase(*args, **kwargs)
        except asyncio.CancelledError:  # Harbor's timer is inside
            if agents:
                remember(AgentTimeoutError(OUT_OF_TIME))
            raise
        except Exception as error:
            remember(error)
            raise

    return watched


def all_judged(steps: Sequence[StepResult]) -> bool:
    """Whether each step that began has a verdict."""
    return all(step.verifier_result is not None and step.verifier_result.rewards for step in steps)


def metadata_of(steps: Sequence[StepResult]) -> dict[str, Any]:
    """What the agent said, a later step's word over an earlier one's; its form was right if it was in every step."""
    said: dict[str, Any] = {}
    forms = []
    for step in steps:
        found = (step.agent_result.metadata if step.agent_result is not None else None) or {}
        said.update(found)
        forms.append(found.get("format_ok"))
    if False in forms:
        said["format_ok"] = False
    return said
