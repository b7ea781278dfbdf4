"""Group and attempt specs: ids, seeds and sampling of every try, decided before anything runs.

In: the run's seed, the iteration, a task and a slot. Out: a `GroupSpec`. Pure: a resumed run builds the same specs
again, so finished attempts are found by their ids.
"""

from __future__ import annotations

from rl360.seeding import seed_from
from rl360.types import AttemptSpec, GroupSpec, Purpose, Sampling, Task


def group_spec(
    *, seed: int, iteration: int, slot: int, task: Task, group_size: int, sampling: Sampling, purpose: Purpose
) -> GroupSpec:
    """`group_size` attempts at `task`. `slot` tells two groups of one iteration on the same task apart."""
    group_id = f"{purpose.value[0]}{iteration:05d}-{slot:03d}-{_safe(task.task_id)}"
    attempts = tuple(
        AttemptSpec(
            attempt_id=f"{group_id}-{index}",
            group_id=group_id,
            iteration=iteration,
            task=task,
            sampling=sampling,
            seed=seed_from(seed, purpose.value, iteration, slot, task.task_id, index),
            purpose=purpose,
        )
        for index in range(group_size)
    )
    return GroupSpec(group_id, iteration, task, attempts, purpose)


def _safe(task_id: str) -> str:
    """Task ids name folders and URLs of sessions."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in task_id)
