import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl360.algorithms.kl import ESTIMATORS, k1, k2, k3

P, Q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])


def test_by_hand():
    # log r = log(0.25 / 0.5) = -0.6931
    assert k1(P, Q).item() == pytest.approx(math.log(2))
    assert k2(P, Q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(P, Q).item() == pytest.approx(0.5 - 1 + math.log(2))


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_signs_and_zero(p, q):
    p, q = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    assert k2(p, q) >= 0
    assert k3(p, q) >= -1e-12
    assert all(float(estimate(p, p)) == 0 for estimate in ESTIMATORS.values())


@given(st.integers(0, 1000))
def test_k1_and_k3_are_unbiased_in_exact_expectation(seed):
    draw = np.random.default_rng(seed)
    p, q = (torch.log_softmax(torch.tensor(draw.normal(size=6)), 0) for _ in range(2))
    exact = float((p.exp() * (p - q)).sum())
    for estimate in (k1, k3):
        assert float((p.exp() * estimate(p, q)).sum()) == pytest.approx(exact, abs=1e-9)


def test_gradients_under_samples_of_p_in_exact_expectation():
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0)

    def gradient(loss):
        return torch.autograd.grad(loss, logits)[0]

    p = torch.log_softmax(logits, 0)
    weights = p.detach().exp()
    forward, reverse = gradient((q.exp() * (q - torch.log_softmax(logits, 0))).sum()), None
    p = torch.log_softmax(logits, 0)
    reverse = gradient((p.exp() * (p - q)).sum())
    expected = {"k1": torch.zeros(3, dtype=torch.float64), "k2": reverse, "k3": forward}
    for name, estimate in ESTIMATORS.items():
        torch.testing.assert_close(
            gradient((weights * estimate(torch.log_softmax(logits, 0), q)).sum()), expected[name]
        )
