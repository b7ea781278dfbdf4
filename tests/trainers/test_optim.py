import math

import pytest
import torch
from torch import nn

from rl360.errors import CheckpointError, NonFiniteGradient
from rl360.trainers.optim import Optimizer, decay_groups


class Two(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[2.0, -4.0]], dtype=dtype))
        self.gain = nn.Parameter(torch.tensor([1.0], dtype=dtype))


def make(module, **changes):
    numbers = {"learning_rate": 0.1, "warmup_steps": 0, "eps": 0.0, "weight_decay": 0.5, "max_grad_norm": 0.0}
    return Optimizer(module, betas=(0.9, 0.98), **numbers | changes)


def set_gradients(module, matrix=(3.0, 4.0), gain=12.0):
    module.matrix.grad = torch.tensor([matrix], dtype=module.matrix.dtype)
    module.gain.grad = torch.tensor([gain], dtype=module.gain.dtype)


def test_only_matrices_decay():
    assert decay_groups(Two().named_parameters()) == (["matrix"], ["gain"])


def test_first_step_by_hand():
    # Adam's first step moves every value by the learning rate against its gradient's sign;
    # decay first takes 0.1 * 0.5 of the matrix, and nothing of the gain.
    module = Two()
    set_gradients(module)
    norm, rate = make(module).step()
    assert norm == pytest.approx(13.0)  # 3, 4, 12
    assert rate == 0.1
    assert module.matrix.flatten().tolist() == pytest.approx([2 * 0.95 - 0.1, -4 * 0.95 - 0.1])
    assert module.gain.item() == pytest.approx(0.9)
    assert module.matrix.grad is None


def test_warm_up_is_linear_and_then_constant():
    module = Two()
    optimizer = make(module, warmup_steps=4, learning_rate=0.4)
    rates = []
    for _ in range(6):
        set_gradients(module)
        rates.append(optimizer.step()[1])
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(("limit", "scale"), [(6.5, 0.5), (0.0, 1.0), (26.0, 1.0)])
def test_clipping_scales_to_the_norm_and_reports_the_norm_before(limit, scale):
    module = Two()
    optimizer = make(module, max_grad_norm=limit)
    set_gradients(module)
    norm, _ = optimizer.step()
    assert norm == pytest.approx(13.0)
    first_moments = optimizer.state()["moments"]["matrix"]["exp_avg"].flatten().tolist()
    assert first_moments == pytest.approx([0.1 * 3 * scale, 0.1 * 4 * scale])


def test_equals_torch_adamw_over_many_steps():
    torch.manual_seed(0)
    ours, theirs = Two(), Two()
    optimizer = make(ours, eps=1e-8)
    groups = [{"params": [theirs.matrix], "weight_decay": 0.5}, {"params": [theirs.gain], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.98), eps=1e-8, foreach=False)
    for _ in range(20):
        matrix, gain = torch.randn(2).tolist(), float(torch.randn(1))
        for module in (ours, theirs):
            set_gradients(module, matrix, gain)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours.matrix, theirs.matrix, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.gain, theirs.gain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_never_steps(bad):
    module = Two()
    optimizer = make(module)
    set_gradients(module, gain=bad)
    with pytest.raises(NonFiniteGradient, match="gain"):
        optimizer.step()
    assert module.matrix.flatten().tolist() == [2.0, -4.0]
    assert module.gain.item() == 1.0
    assert optimizer.num_steps == 0
    assert optimizer.state()["moments"] == {}
    assert module.gain.grad is None


def test_bf16_weights_step_through_fp32_masters():
    # bf16 has 8 bits of mantissa: near 1 a step of 1e-3 is lost, but ten of them are not
    module = Two(torch.bfloat16)
    optimizer = make(module, learning_rate=1e-3, weight_decay=0.0)
    for step in range(1, 11):
        for _ in range(2):  # two micro-batches: their gradients add up in fp32
            (module.matrix.sum() + module.gain.sum()).backward()
        assert module.gain.grad is None
        assert optimizer.gradient(module.gain).item() == 2.0
        optimizer.step()
        assert optimizer.state()["masters"]["gain"].item() == pytest.approx(1 - 1e-3 * step, rel=1e-5)
    assert module.gain.item() == pytest.approx(0.99, abs=2**-8)
    assert module.gain.dtype == torch.bfloat16


def test_a_state_of_another_model_is_refused_before_anything_changes():
    module = Two()
    optimizer = make(module)
    state = optimizer.state()
    for masters, name in (
        ({"matrix": torch.zeros(1, 2)}, "gain"),
        ({"matrix": torch.zeros(3, 2), "gain": torch.zeros(1)}, "matrix"),
        ({**state["masters"], "extra": torch.zeros(1)}, "extra"),
    ):
        with pytest.raises(CheckpointError, match=name):
            optimizer.load({**state, "masters": masters})
    assert module.matrix.flatten().tolist() == [2.0, -4.0]
