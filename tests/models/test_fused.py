"""The fused parts against the plain expressions: values and gradients in fp64, where rounding cannot hide a mistake."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rl360.models.fused import rms_norm, swiglu_down


def gradients_of(function, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    (out * random(*out.shape, seed=9).to(out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 8)])
def test_rms_norm(shape):
    x, weight = random(*shape), random(8, seed=1)
    ours = gradients_of(lambda x, w: rms_norm(x, w, 1e-5), [x, weight])
    plain = gradients_of(lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w, [x, weight])
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_rms_norm_by_hand():
    """x = (3, 4): mean square 12.5; normed (3, 4) / sqrt(12.5)."""
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[0.848528, 2.262742]]), rtol=1e-5, atol=1e-5)


def test_swiglu_down():
    gate, up, weight = random(7, 6), random(7, 6, seed=1), random(4, 6, seed=2)
    ours = gradients_of(swiglu_down, [gate, up, weight])
    plain = gradients_of(lambda g, u, w: (functional.silu(g) * u) @ w.T, [gate, up, weight])
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_inputs_are_not_changed():
    gate, up, weight = (random(3, 6), random(3, 6, seed=1), random(4, 6, seed=2))
    before = [x.clone() for x in (gate, up, weight)]
    gradients_of(swiglu_down, [gate, up, weight])
    assert all(torch.equal(a, b) for a, b in zip(before, (gate, up, weight), strict=True))


def test_fp32_through_the_fast_linear():
    gate, up, weight = random(40, 96), random(40, 96, seed=1), random(48, 96, seed=2)
    exact = gradients_of(swiglu_down, [gate, up, weight])
    single = gradients_of(swiglu_down, [x.float() for x in (gate, up, weight)])
    for mine, theirs in zip(single, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
