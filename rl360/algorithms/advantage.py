"""Group-relative advantages.

In: the rewards of one group's attempts, None for an attempt without a valid one. Out: one advantage an attempt. Left to
others: which groups to keep (filter.py), weighting of tokens (reduce.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Added to the standard deviation, so that nearly equal rewards do not divide by zero. Rewards are of order one.
STD_EPS = 1e-6


def group_relative(rewards: Sequence[float | None], normalize_std: bool) -> list[float | None]:
    """Return reward minus the group's mean, optionally over the group's standard deviation.

    Source: GRPO, DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r).
    Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training",
    arXiv:2503.20783), which does not weigh easy and hard tasks up; the length term that it drops too is the reducer's
    here. Where we differ: attempts without a valid reward take no part in mean or standard deviation; the standard
    deviation is the sample one (n - 1), plus `STD_EPS`.

    Args:
        rewards: one an attempt; None: not valid. Valid rewards are finite.
        normalize_std: divide by the standard deviation.

    Returns:
        One advantage an attempt, None where the reward is None; 0 for a lone valid attempt. Without the division the
        advantages sum to 0.
    """
    values = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if values.size == 0:
        return [None] * len(rewards)
    mean = values.mean()
    scale = 1.0
    if normalize_std and values.size > 1:
        scale = 1.0 / (values.std(ddof=1) + STD_EPS)
    return [None if reward is None else float((reward - mean) * scale) for reward in rewards]
