import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.algorithms.advantage import STD_EPS, group_relative


def test_without_std_by_hand():
    # mean of the valid 1, 0, 0.7, 0 is 0.425
    result = group_relative([1.0, None, 0.0, 0.7, 0.0], normalize_std=False)
    assert result[1] is None
    assert [a for a in result if a is not None] == pytest.approx([0.575, -0.425, 0.275, -0.425], abs=1e-12)


def test_with_std_by_hand():
    # 1, 0, 0: mean 1/3, deviations 2/3, -1/3, -1/3, variance (4 + 1 + 1) / 9 / 2 = 1/3
    std = 3**-0.5
    expected = [2 / 3 / (std + STD_EPS), -1 / 3 / (std + STD_EPS), -1 / 3 / (std + STD_EPS)]
    assert group_relative([1.0, 0.0, 0.0], normalize_std=True) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_degenerate_groups(normalize_std):
    assert group_relative([], normalize_std) == []
    assert group_relative([None, None], normalize_std) == [None, None]
    assert group_relative([None, 5.0], normalize_std) == [None, 0.0]
    assert group_relative([0.5, 0.5], normalize_std) == [0.0, 0.0]


rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=12)


@given(rewards, st.booleans())
def test_invariants(values, normalize_std):
    result = group_relative(values, normalize_std)
    assert [a is None for a in result] == [r is None for r in values]
    valid = [a for a in result if a is not None]
    assert sum(valid) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, valid), 1.0))
    without = group_relative([r for r in values if r is not None], normalize_std)
    assert valid == without


@given(st.lists(st.sampled_from([-0.3, 0.0, 0.7, 1.0]), min_size=2, max_size=8), st.floats(-5, 5))
def test_shift_changes_nothing(values, shift):
    np.testing.assert_allclose(
        group_relative([v + shift for v in values], True), group_relative(values, True), atol=1e-6
    )
