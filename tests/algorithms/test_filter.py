import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.algorithms.filter import differing_rewards, valid_reward
from rl360.types import Keep, Stop
from tests.algorithms.helpers import attempt, group_of, rewards_group, segment

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((1.0, 0.0), Keep(True)),
        ((0.7, 1.0, None, NAN), Keep(True)),
        ((1.0, 1.0), Keep(False, "equal_rewards")),
        ((0.3, 0.1 + 0.2), Keep(False, "equal_rewards")),
        ((1.0, None), Keep(False, "too_few_valid")),
        ((1.0, NAN), Keep(False, "too_few_valid")),
        ((1.0, INF), Keep(False, "too_few_valid")),
        ((None, NAN, -INF), Keep(False, "too_few_valid")),
        ((1.0,), Keep(False, "too_few_valid")),
        ((), Keep(False, "too_few_valid")),
    ],
)
def test_rule(rewards, kept):
    assert differing_rewards(rewards_group(*rewards)) == kept


def test_aborted_and_unscored_attempts_have_no_reward():
    assert valid_reward(attempt(1.0, stop=Stop.INFRASTRUCTURE)) is None
    assert valid_reward(attempt(1.0, scored=False)) is None
    assert valid_reward(attempt(0.0, stop=Stop.LENGTH)) == 0.0


def test_group_without_any_sampled_token():
    empty = [attempt(1.0, number=0), attempt(0.0, segment(sampled=0), number=1)]
    assert differing_rewards(group_of(*empty)) == Keep(False, "no_sampled_tokens")
    assert differing_rewards(group_of(*empty, attempt(0.0, segment(), number=2))) == Keep(True)


@given(st.lists(st.one_of(st.none(), st.just(NAN), st.just(INF), st.sampled_from([-0.3, 0.0, 0.7, 1.0])), max_size=8))
def test_kept_exactly_when_two_valid_rewards_differ(rewards):
    valid = {r for r in rewards if r is not None and math.isfinite(r)}
    assert differing_rewards(rewards_group(*rewards)).keep == (len(valid) > 1)
