"""Which groups carry a training signal.

In: the attempts of one group. Out: `Keep`, with the name of the rule that dropped it. Left to others: counting the
dropped attempts (engine ledger) and masking single invalid attempts (advantage.py).

Dynamic filtering follows DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2, equation 11): a group whose rewards are
all equal has zero advantage everywhere and only dilutes the batch. Where we differ: rewards are compared, not counts of
right answers, and nothing is resampled to fill the batch up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rl360.types import Attempt, Group, Keep

TOO_FEW_VALID = "too_few_valid"
EQUAL_REWARDS = "equal_rewards"
NO_SAMPLED_TOKENS = "no_sampled_tokens"

FILTERS = ("differing_rewards", "none")

# Rewards are sums of a few terms near 1; a smaller difference is rounding (0.1 + 0.2 against 0.3), not a signal.
REWARD_TOLERANCE = 1e-9


def valid_reward(attempt: Attempt) -> float | None:
    """Return the attempt's reward, or None where it has none that can be compared (no score, masked, NaN, infinite)."""
    reward = attempt.reward
    return None if reward is None or not math.isfinite(reward) else float(reward)


def differ(rewards: Iterable[float]) -> bool:
    """Return True where at least two of the (finite) rewards differ by more than rounding."""
    values = list(rewards)
    return len(values) > 1 and max(values) - min(values) > REWARD_TOLERANCE * max(1.0, *map(abs, values))


def differing_rewards(group: Group) -> Keep:
    """Keep a group with at least two valid, differing rewards and at least one token to train.

    Returns:
        `Keep(True)`, or `Keep(False, rule)` with the first rule of `too_few_valid`, `equal_rewards`,
        `no_sampled_tokens` that drops it. An empty group is dropped as `too_few_valid`.
    """
    valid = [(attempt, reward) for attempt in group.attempts if (reward := valid_reward(attempt)) is not None]
    if len(valid) < 2:
        return Keep(False, TOO_FEW_VALID)
    if not differ(reward for _, reward in valid):
        return Keep(False, EQUAL_REWARDS)
    if not any(attempt.num_sampled_tokens for attempt, _ in valid):
        return Keep(False, NO_SAMPLED_TOKENS)
    return Keep(True)
