"""Success on tasks that are not trained on, pinned to one weight version and outside the training counts.

In: the evaluation tasks; then finished groups. Out: group specs for the same rollout that training uses, and an
`EvalReport`. The loop submits and waits, since it also watches for a request to stop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rl360.rollout.specs import group_spec
from rl360.types import EvalReport, Group, GroupSpec, Purpose, Sampling, Task


class Evaluator:
    """k attempts at each of a fixed set of tasks."""

    def __init__(self, *, tasks: Sequence[Task], k: int, sampling: Sampling, seed: int):
        self._tasks = tuple(tasks)
        self._k = k
        self._sampling = sampling
        self._seed = seed

    def specs(self, iteration: int) -> list[GroupSpec]:
        return [
            group_spec(
                seed=self._seed,
                iteration=iteration,
                slot=slot,
                task=task,
                group_size=self._k,
                sampling=self._sampling,
                purpose=Purpose.EVAL,
            )
            for slot, task in enumerate(self._tasks)
        ]

    def summarize(self, version: int, iteration: int, groups: Sequence[Group]) -> EvalReport:
        return summarize(version, iteration, groups)


def summarize(version: int, iteration: int, groups: Sequence[Group]) -> EvalReport:
    """Success over attempts with a verdict; an evaluation of nothing but masked attempts has no rate."""
    by_task: dict[str, list[float]] = defaultdict(list)
    rewards: list[float] = []
    attempts = [a for g in groups for a in g.attempts]
    for attempt in attempts:
        if attempt.valid and attempt.success is not None:
            by_task[attempt.spec.task.task_id].append(float(attempt.success))
        if attempt.reward is not None:
            rewards.append(attempt.reward)
    verdicts = [v for values in by_task.values() for v in values]
    return EvalReport(
        version=version,
        iteration=iteration,
        num_attempts=len(attempts),
        num_valid=len(verdicts),
        success_rate=sum(verdicts) / len(verdicts) if verdicts else None,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        by_task={task: sum(values) / len(values) for task, values in sorted(by_task.items())},
    )
