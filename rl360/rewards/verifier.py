"""The task's own verdict: what Harbor's verifier wrote, as a reward that decides success.

In: finished attempts with their trial results. Out: one Score each; raw and shaped are the verdict itself. An attempt
without a usable verdict (none, not a number, not finite) is invalid with a cause, never a zero. Penalties are left to
other rewards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from rl360.types import Attempt, Score, Task

log = logging.getLogger(__name__)

NO_VERDICT = "no_verdict"  # no trial, no rewards, or no entry for the key
BAD_VERDICT = "bad_verdict"  # an entry that is not a finite number


class VerifierReward:
    """`key` names the entry of the verifier's rewards; success is raw >= success_at.

    `without_verdict` is the shaped score of an attempt that did itself out of a verdict (it used up its sandbox, say).
    It must not be above the lowest verdict, or the policy learns to end that way: each new lowest is warned of.
    """

    scope = "attempt"
    required = True

    def __init__(self, name: str, key: str = "reward", success_at: float = 1.0, without_verdict: float = 0.0):
        if not math.isfinite(without_verdict):
            raise ValueError(f"reward.{name}.without_verdict: {without_verdict}; expected a finite number")
        self.name = name
        self.key = key
        self.success_at = success_at
        self.without_verdict = without_verdict
        self._lowest = without_verdict

    async def score(self, task: Task, attempts: Sequence[Attempt], deadline_s: float) -> Sequence[Score]:
        """One Score per attempt, in order. Reads records only, so the deadline is of no use here."""
        return [self._score(attempt) for attempt in attempts]

    def _score(self, attempt: Attempt) -> Score:
        rewards = attempt.trial.rewards if attempt.trial else None
        if not rewards:
            return _invalid(NO_VERDICT)
        value = self._entry(rewards)
        if value is None:
            return _invalid(NO_VERDICT)
        # A bool is a verdict too: some verifiers write true and false.
        if not isinstance(value, int | float) or not math.isfinite(value):
            return _invalid(BAD_VERDICT)
        raw = float(value)
        if raw < self._lowest:
            self._lowest = raw
            log.warning(
                "reward %s: a verdict of %g, which is less than the %g of an attempt that uses up its sandbox; set "
                "reward.%s.without_verdict to the lowest that the tests give, or the policy learns to end that way",
                self.name, raw, self.without_verdict, self.name,
            )  # fmt: skip
        return Score(raw=raw, shaped=raw, success=raw >= self.success_at)

    def _entry(self, rewards: Mapping[str, object]) -> object:
        """The entry of the key; where there is only one entry, that one, whatever its name."""
        if self.key in rewards:
            return rewards[self.key]
        return next(iter(rewards.values())) if len(rewards) == 1 else None


def _invalid(cause: str) -> Score:
    return Score(raw=None, shaped=0.0, valid=False, cause=cause)
