import math

import pytest
import torch

from rl360.algorithms.correction import MAX_LOG_RATIO, bounded_exp, truncated_importance_weight


def test_by_hand():
    proximal = torch.tensor([math.log(0.5), math.log(0.9), math.log(0.2)], requires_grad=True)
    behaviour = torch.tensor([math.log(0.5), math.log(0.3), math.log(0.4)])
    weight = truncated_importance_weight(proximal, behaviour, cap=2.0)
    assert weight.tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert not weight.requires_grad


def test_no_cap_means_no_correction():
    assert truncated_importance_weight(torch.tensor([-1.0]), torch.tensor([-9.0]), cap=None).tolist() == [1.0]


def test_one_absurd_token_stays_finite():
    assert bounded_exp(torch.tensor([1000.0])).item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert bounded_exp(torch.tensor([-1000.0])).item() == 0.0
