"""A penalty for a right answer in the wrong form.

In: attempts that already carry the verifier's score. Out: one Score each: -penalty if the attempt succeeded but its
agent reported `format_ok: False`, else 0. An attempt that failed pays nothing (the reference recipe takes the penalty
from otherwise successful attempts only), so a group of failures has no signal in its format. It never decides success,
and never makes an attempt invalid: that is the verifier's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl360.types import Attempt, Score, Task


class FormatPenalty:
    """`verifier` names the reward that decides success; it has to come earlier in the experiment's rewards."""

    scope = "attempt"
    required = False

    def __init__(self, name: str, penalty: float = 0.3, verifier: str = "verifier"):
        if penalty < 0:
            raise ValueError(f"reward.{name}.penalty: {penalty}; expected 0 or more: it is subtracted")
        self.name = name
        self.penalty = penalty
        self.verifier = verifier

    async def score(self, task: Task, attempts: Sequence[Attempt], deadline_s: float) -> Sequence[Score]:
        """One Score per attempt, in order; raw is 1 for a bad form, 0 for a good one, None where the agent kept none.

        Raises `KeyError` when an attempt has no score of `verifier`: the rewards are in the wrong order.
        """
        return [self._score(attempt) for attempt in attempts]

    def _score(self, attempt: Attempt) -> Score:
        format_ok = attempt.trial.agent_metadata.get("format_ok") if attempt.trial else None
        raw = None if format_ok is None else float(format_ok is False)
        if self.verifier not in attempt.scores:
            earlier = ", ".join(attempt.scores) or "none"
            raise KeyError(f"reward.{self.name}.verifier: no score named {self.verifier}; earlier rewards: {earlier}")
        verdict = attempt.scores[self.verifier]
        charged = format_ok is False and verdict.valid and verdict.success is True
        return Score(raw=raw, shaped=-self.penalty if charged else 0.0)
