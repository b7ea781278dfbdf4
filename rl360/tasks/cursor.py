"""Which tasks come next: whole shuffled passes over the training tasks, as a pure function of seed and position.

In: the tasks and the run's seed. Out: the next `count` tasks. A position is all there is to save; a resumed run asks
for the same tasks in the same order, and `fingerprint` notices a data set that changed in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rl360.seeding import seed_from
from rl360.types import Task


class TaskCursor:
    """Deals tasks without replacement within a pass; each pass has its own order."""

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0):
        if not tasks:
            raise ValueError("no tasks to deal")
        self._tasks = sorted(tasks, key=lambda task: task.task_id)
        self._seed = seed
        self.position = position

    def take(self, count: int) -> list[Task]:
        taken = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Task:
        pass_number, index = divmod(position, len(self._tasks))
        order = np.random.default_rng(seed_from(self._seed, "tasks", pass_number)).permutation(len(self._tasks))
        return self._tasks[int(order[index])]

    @property
    def fingerprint(self) -> str:
        """sha256 over the ids and contents of the tasks."""
        digest = hashlib.sha256()
        for task in self._tasks:
            digest.update(f"{task.task_id}\0{task.content_hash}\n".encode())
        return digest.hexdigest()
