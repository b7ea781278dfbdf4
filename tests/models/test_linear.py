"""The fast linear against fp64, forward and backward, over the row counts at which its route changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.models.linear import joined_linear, linear


def adjacent(sizes, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(sizes), width, generator=generator)
    return [torch.nn.Parameter(part) for part in whole.split(sizes)]


def test_by_hand():
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    w = torch.tensor([[3.0, 4.0], [5.0, 6.0], [-1.0, 0.5]], requires_grad=True)
    out = linear(x, w)
    assert out.tolist() == [[11.0, 17.0, 0.0]]
    out.backward(torch.tensor([[1.0, 0.0, 2.0]]))
    assert x.grad.tolist() == [[1.0, 5.0]]
    assert w.grad.tolist() == [[1.0, 2.0], [0.0, 0.0], [2.0, 4.0]]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 33, 96, 97, 300])
@pytest.mark.parametrize("joined", [False, True])
def test_forward_and_gradients_equal_fp64(rows, joined):
    torch.manual_seed(rows)
    weights = adjacent([24, 8, 8], 40)
    x = torch.randn(rows, 40, requires_grad=True)
    up = torch.randn(rows, 40)
    outs = joined_linear(x, weights) if joined else [linear(x, w) for w in weights]
    torch.cat(outs, -1).backward(up)

    x64 = x.detach().double().requires_grad_()
    w64 = torch.cat([w.detach().double() for w in weights]).requires_grad_()
    exact = x64 @ w64.T
    exact.backward(up.double())
    tolerance = {"atol": 1e-4, "rtol": 1e-5}
    torch.testing.assert_close(torch.cat(outs, -1).double(), exact, **tolerance)
    torch.testing.assert_close(x.grad.double(), x64.grad, **tolerance)
    torch.testing.assert_close(torch.cat([w.grad for w in weights]).double(), w64.grad, **tolerance)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 130), out=st.integers(1, 30), width=st.integers(1, 30), layout=st.sampled_from("abc"))
def test_any_shape_and_layout(rows, out, width, layout):
    torch.manual_seed(rows * 1000 + out * 30 + width)
    x = torch.randn(width, rows).t() if layout == "a" else torch.randn(rows, width)
    if layout == "b":
        x = torch.randn(rows, 2 * width)[:, ::2]
    w = torch.randn(out, width, requires_grad=True)
    x = x.requires_grad_()
    linear(x, w).sum().backward()  # an expanded gradient, all strides zero
    torch.testing.assert_close(w.grad, x.detach().sum(0).expand(out, width), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(rows, width), atol=1e-3, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w), x @ w.t(), atol=1e-4, rtol=1e-4)


def test_leading_axes_and_empty_input():
    w = torch.randn(5, 3)
    assert linear(torch.randn(2, 4, 3), w).shape == (2, 4, 5)
    assert linear(torch.empty(0, 3), w).shape == (0, 5)


def test_weights_apart_in_memory_give_the_same():
    apart = [torch.randn(4, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)]
    x = torch.randn(7, 6)
    for got, w in zip(joined_linear(x, apart), apart, strict=True):
        torch.testing.assert_close(got, x @ w.t())


def test_frozen_weight_gets_no_gradient():
    first, second = adjacent([4, 4], 6)
    first.requires_grad_(False)
    torch.cat(joined_linear(torch.randn(3, 6), (first, second)), -1).sum().backward()
    assert first.grad is None
    assert second.grad is not None


def test_low_precision_goes_to_torch():
    x, w = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x.float(), w.float()).dtype == torch.bfloat16


def test_weight_updated_in_place_between_forward_and_backward_is_noticed():
    w = torch.randn(3, 4, requires_grad=True)
    out = linear(torch.randn(2, 4, requires_grad=True), w)
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
