"""Forward and hand-written backward of each block against plain expressions and autograd, in fp64."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rl360.models.decoder import RMSNorm, rotary_table, rotate
from rl360.models.megatron import wgrad
from rl360.models.megatron.blocks import Setting, add_norm, embed, norm_column, row, split_rotate, swiglu_row
from rl360.models.megatron.pointwise import kernels, rotary_angles

EPS = 1e-5


def setting(groups=1):
    return Setting(kernels(), EPS, groups, None, False)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def reference_norm(x, gain, groups):
    norm = RMSNorm(x.shape[-1], EPS, groups).double()
    norm.weight = nn.Parameter(gain.detach())
    grouped = x.unflatten(-1, (groups, -1))
    return (grouped / (grouped.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2) * gain


def assert_same_with_gradients(got, expected, inputs):
    """Values, and gradients of all inputs under random gradients of the outputs."""
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    grads = [draw(*x.shape, seed=50 + i).detach() for i, x in enumerate(expected)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    wanted = torch.autograd.grad(expected, inputs, grads)
    found = torch.autograd.grad(got, inputs, grads)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda text, i=i: f"input {i}: {text}")


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("added", [True, False])
def test_norm_column(groups, added):
    x, y, gain, weight = draw(5, 12), draw(5, 12, seed=1), draw(12, seed=2), draw(7, 12, seed=3)
    total = x + y if added else x
    expected = (total, reference_norm(total, gain, groups) @ weight.T)
    inputs = (x, y, gain, weight) if added else (x, gain, weight)
    assert_same_with_gradients(norm_column(x, y if added else None, gain, weight, setting(groups)), expected, inputs)


@pytest.mark.parametrize("groups", [1, 2])
def test_last_norm(groups):
    x, y, gain = draw(4, 8), draw(4, 8, seed=1), draw(8, seed=2)
    assert_same_with_gradients(add_norm(x, y, gain, setting(groups)), reference_norm(x + y, gain, groups), (x, y, gain))


def test_row_and_swiglu_row():
    x, weight = draw(4, 6), draw(5, 6, seed=1)
    assert_same_with_gradients(row(x, weight, setting()), x @ weight.T, (x, weight))
    gate_up = draw(4, 12, seed=2)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = (functional.silu(gate) * up) @ weight.T
    assert_same_with_gradients(swiglu_row(gate_up, weight, setting()), expected, (gate_up, weight))


def test_embed():
    ids, weight = torch.tensor([3, 0, 3, 5]), draw(6, 4)
    assert_same_with_gradients(embed(ids, weight, 0, setting()), weight[ids], (weight,))


@pytest.mark.parametrize("normed", [True, False])
def test_split_rotate(normed):
    """Groups of two query heads, one key and one value, each rotated as the decoder rotates whole heads."""
    groups, queries, width = 3, 2, 4
    qkv = draw(5, groups * (queries + 2) * width)
    gains = (draw(width, seed=1), draw(width, seed=2)) if normed else None
    positions = torch.tensor([0, 1, 2, 0, 7])
    frequencies = 100.0 ** -(torch.arange(0, width, 2).double() / width)
    cos, sin = rotary_angles(positions, frequencies)
    table = [t[positions].double().unsqueeze(1) for t in rotary_table(8, width, 100.0)]

    heads = qkv.view(5, groups, queries + 2, width)
    q, k, v = heads[:, :, :queries].flatten(1, 2), heads[:, :, queries], heads[:, :, queries + 1]
    if gains is not None:
        q, k = (reference_norm(x, gain, 1) for x, gain in zip((q, k), gains, strict=True))
    expected = (rotate(q, *table), rotate(k, *table), v)
    got = split_rotate(qkv, gains, cos, sin, width, groups, setting())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # the decoder's table is of fp32
    inputs = (qkv, *(gains or ()))
    grads = [draw(*x.shape, seed=60 + i).detach() for i, x in enumerate(expected)]
    wanted = torch.autograd.grad(expected, inputs, grads)
    found = torch.autograd.grad(got, inputs, grads)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_go_to_the_buffer_and_add_up_over_micro_batches():
    """With `main_grad`, autograd gets none: the buffer has the sum, and input gradients are as without it."""
    weight, gain = (nn.Parameter(draw(*shape, seed=s).detach()) for shape, s in (((7, 12), 3), ((12,), 2)))
    parts = [draw(5, 12, seed=s) for s in (0, 1)]

    def total(x):
        return norm_column(x, None, gain, weight, setting())[1].sum()

    plain = [torch.autograd.grad(total(x), (x, gain, weight)) for x in parts]
    for parameter in (weight, gain):
        parameter.main_grad = torch.zeros_like(parameter)
    for x, (grad_x, _, _) in zip(parts, plain, strict=True):
        total(x).backward()
        torch.testing.assert_close(x.grad, grad_x)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, plain[0][2] + plain[1][2])
    torch.testing.assert_close(gain.main_grad, plain[0][1] + plain[1][1])


def test_an_embedding_row_that_is_used_twice_gets_both_gradients_in_the_buffer():
    weight = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(4, 2)
    assert wgrad.add_rows(weight, torch.tensor([1, 3, 1]), torch.tensor([[1.0, 2.0], [5.0, 6.0], [10.0, 20.0]])) is None
    assert weight.main_grad.tolist() == [[0, 0], [11, 22], [0, 0], [5, 6]]


def test_what_a_layer_keeps():
    """Residual stream and [gate; up] stay for the backward pass, normalised and activated inputs do not."""
    x, gain, weight = draw(5, 12), draw(12, seed=1), draw(8, 12, seed=2)
    out = norm_column(x, None, gain, weight, setting())[1]
    assert [tuple(t.shape) for t in out.grad_fn.saved_tensors] == [(5, 12), (5, 1)]
    gate_up = draw(5, 8, seed=3)
    out = swiglu_row(gate_up, draw(6, 4, seed=4), setting())
    assert [tuple(t.shape) for t in out.grad_fn.saved_tensors] == [(5, 8)]


def test_bf16_llama_rounds_before_the_gain_and_grouped_norms_after():
    gain = torch.tensor([1.0078125, 1.0])
    x = torch.tensor([[3.0, 1.0]], dtype=torch.bfloat16)
    normed = x.double() / 5.0**0.5
    llama, _ = kernels().norm(x, gain.bfloat16(), 0.0, 1)
    assert torch.equal(llama, normed.bfloat16() * gain.bfloat16())
    x, gain = torch.cat((x, x), 1), torch.cat((gain, gain))
    grouped, _ = kernels().norm(x, gain.bfloat16(), 0.0, 2)
    exact = (x.double() / 5.0**0.5 * gain.double()).bfloat16()
    assert torch.equal(grouped, exact)
