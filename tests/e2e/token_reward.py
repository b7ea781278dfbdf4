"""A reward that a random model earns at random: it makes groups differ, so that gradients are not zero."""

from __future__ import annotations

from collections.abc import Sequence

from rl360.types import Attempt, Score, Task


class TokenReward:
    """(sum of the sampled ids modulo 7) / 7: a function of the tokens alone."""

    scope = "attempt"
    required = True

    def __init__(self, name: str) -> None:
        self.name = name

    async def score(self, task: Task, attempts: Sequence[Attempt], deadline_s: float) -> list[Score]:
        return [Score(raw=value, shaped=value) for value in map(_value, attempts)]


def _value(attempt: Attempt) -> float:
    return sum(int(s.token_ids_T[s.loss_mask_T].sum()) for s in attempt.segments) % 7 / 7
