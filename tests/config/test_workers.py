import os

import pytest

from rl360.config.schemas import RolloutConfig
from rl360.config.workers import num_trial_workers


@pytest.mark.parametrize(
    ("cores", "concurrency", "expected"),
    [
        (1, 128, 2),  # never fewer: one is busy while the other waits
        (2, 64, 2),
        (4, 64, 3),  # one core for what generates
        (16, 64, 4),  # 16 attempts each
        (64, 128, 8),
        (256, 2048, 16),  # the most
        (64, 4, 2),
    ],
)
def test_workers_follow_cores_and_attempts(cores, concurrency, expected):
    assert num_trial_workers(RolloutConfig(concurrency=concurrency), cores) == expected


def test_a_number_that_was_asked_for_is_taken():
    assert num_trial_workers(RolloutConfig(num_workers=5, concurrency=1), 2) == 5


def test_cores_are_those_that_this_process_may_use():
    here = num_trial_workers(RolloutConfig(concurrency=512))
    assert here == max(2, min(len(os.sched_getaffinity(0)) - 1, 16))
