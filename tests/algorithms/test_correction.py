import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.algorithms.correction import MAX_LOG_RATIO, ImportanceCorrection, bounded_exp


def logs(*probabilities):
    return torch.tensor([math.log(p) for p in probabilities])


def test_by_hand():
    proximal = logs(0.5, 0.9, 0.2).requires_grad_()
    weight = ImportanceCorrection(cap=2.0).of_tokens(proximal, logs(0.5, 0.3, 0.4))
    assert weight.tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert not weight.requires_grad


def test_no_cap_means_no_correction():
    assert ImportanceCorrection(cap=None).of_tokens(torch.tensor([-1.0]), torch.tensor([-9.0])).tolist() == [1.0]


def test_outside_the_band_nothing_is_left():
    # ratios 1/4, 1/2, 1, 4, 8 against a band from 1/2 to 5
    proximal, behaviour = logs(0.1, 0.2, 0.4, 0.8, 0.8), logs(0.4, 0.4, 0.4, 0.2, 0.1)
    band = {"mask_below": 0.5 - 1e-6, "mask_above": 5.0}
    assert ImportanceCorrection(2.0, **band).of_tokens(proximal, behaviour).tolist() == pytest.approx(
        [0.0, 0.5, 1.0, 2.0, 0.0]
    )
    assert ImportanceCorrection(None, **band).of_tokens(proximal, behaviour).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_a_sequence_is_weighed_by_its_product_and_banded_by_its_mean():
    # two tokens of ratio 1.5 each: product 2.25, truncated to 2, mean 1.5; 100 tokens of 1.01: product 2.7, mean 1.01;
    # one token of 0.4: product and mean 0.4
    sums = torch.tensor([2 * math.log(1.5), 100 * math.log(1.01), math.log(0.4)])
    counts = torch.tensor([2, 100, 1])
    assert ImportanceCorrection(2.0).of_sequences(sums, counts).tolist() == pytest.approx([2.0, 2.0, 0.4])
    banded = ImportanceCorrection(3.0, mask_below=0.5, mask_above=1.2).of_sequences(sums, counts)
    assert banded.tolist() == pytest.approx([0.0, 1.01**100, 0.0], rel=1e-4)


def test_only_what_is_outside_the_band_weighs_nothing():
    # 1,000 tokens of ratio 0.8: their product is e^-223, below fp32's smallest number, and their mean is in the band
    sums, counts = torch.tensor([1000 * math.log(0.8), 1000 * math.log(0.4)]), torch.tensor([1000, 1000])
    inside, outside = ImportanceCorrection(2.0, mask_below=0.5, mask_above=5.0).of_sequences(sums, counts).tolist()
    assert 0.0 < inside < 1e-30
    assert outside == 0.0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=8),
    st.floats(0.1, 5.0),
    st.floats(0.1, 1.0),
    st.floats(1.0, 10.0),
)
def test_weights_are_bounded_and_zero_exactly_outside(pairs, cap, below, above):
    proximal, behaviour = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    weights = ImportanceCorrection(cap, below, above).of_tokens(proximal, behaviour)
    for p, b, weight in zip(proximal.tolist(), behaviour.tolist(), weights.tolist(), strict=True):
        inside = math.log(below) <= p - b <= math.log(above)
        assert weight == pytest.approx(min(math.exp(p - b), cap) if inside else 0.0)


def test_a_sequence_of_one_token_is_a_token():
    correction = ImportanceCorrection(1.7, 0.4, 3.0)
    proximal, behaviour = logs(0.1, 0.5, 0.9, 0.8), logs(0.4, 0.4, 0.4, 0.2)
    assert torch.equal(
        correction.of_tokens(proximal, behaviour), correction.of_sequences(proximal - behaviour, torch.ones(4))
    )


def test_one_absurd_token_stays_finite():
    assert bounded_exp(torch.tensor([1000.0])).item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert bounded_exp(torch.tensor([-1000.0])).item() == 0.0
