import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.algorithms.reduce import REDUCERS, sequence_mean, token_mean


def test_token_mean_by_hand():
    assert token_mean([3, 0, 1]) == [0.25, 0.0, 0.25]


def test_sequence_mean_by_hand():
    # two attempts with tokens: 1/2 each, shared by 3 tokens and by 1
    assert sequence_mean([3, 0, 1]) == pytest.approx([1 / 6, 0.0, 0.5])


@pytest.mark.parametrize("name", REDUCERS)
@given(counts=st.lists(st.integers(0, 500), max_size=20))
def test_weights_of_all_tokens_sum_to_one(name, counts):
    weights = REDUCERS[name](counts)
    total = sum(w * c for w, c in zip(weights, counts, strict=True))
    assert total == pytest.approx(1.0 if any(counts) else 0.0)
