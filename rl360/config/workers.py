"""How many processes run trials.

A worker is one thread of Python that spends 50 to 150 ms of CPU on an attempt: 256 attempts an iteration kept two of
them busy for 17 s on a 32-core host where generating took 1 s.
"""

from __future__ import annotations

import os

from rl360.config.schemas import RolloutConfig

FEWEST, MOST = 2, 16
ATTEMPTS_EACH = 16  # open at once; fewer do not keep a worker busy


def num_trial_workers(rollout: RolloutConfig, cores: int | None = None) -> int:
    """`rollout.num_workers`; where that is 0, what `cores` (those that this process may use) and attempts warrant."""
    if rollout.num_workers:
        return rollout.num_workers
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(FEWEST, min(cores - 1, rollout.concurrency // ATTEMPTS_EACH, MOST))
