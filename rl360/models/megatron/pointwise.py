"""The elementwise parts of a layer, forward and backward, as plain functions of tensors.

In: activations and gains. Out: activations or gradients, computed in fp32 (fp64 for fp64 inputs) and rounded once.
Left to others: matrix products and the autograd functions that call these (blocks.py).

Each function is one or two passes over memory once compiled, and there are only these: `kernels(compiled=True)` hands
them through torch.compile, which needs CUDA to pay off. They are forward-only on purpose: the gradients are written
out, so that what a layer keeps for its backward pass is decided in blocks.py and not by a partitioner.

Axes: N tokens, F features, G key/value groups, R query heads of one group, D head width, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def wide(x: Tensor) -> Tensor:
    """fp32, or fp64 for fp64."""
    return x if x.dtype == torch.float64 else x.float()


def _normed(x_NF: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    """(x / rms(x) of each of `groups` contiguous slices, 1 / rms [N, groups]); both wide."""
    grouped = wide(x_NF).unflatten(-1, (groups, -1))
    rstd = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return (grouped * rstd).flatten(-2), rstd.squeeze(-1)


def _gain(normed_NF: Tensor, weight_F: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    # Llama rounds before it multiplies, K2 Horizon (grouped) after.
    return normed_NF.to(dtype) * weight_F if groups == 1 else (normed_NF * wide(weight_F)).to(dtype)


def norm(x_NF: Tensor, weight_F: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    """RMSNorm (Zhang and Sennrich 2019): (normalised and scaled [N, F], 1 / rms [N, groups])."""
    normed, rstd = _normed(x_NF, eps, groups)
    return _gain(normed, weight_F, groups, x_NF.dtype), rstd


def add_norm(x_NF: Tensor, y_NF: Tensor, weight_F: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x + y, `norm` of it, 1 / rms)."""
    total = x_NF + y_NF
    return total, *norm(total, weight_F, eps, groups)


def norm_again(x_NF: Tensor, rstd_NG: Tensor, weight_F: Tensor, groups: int) -> Tensor:
    """What `norm` gave, from its input and its 1 / rms."""
    normed = (wide(x_NF).unflatten(-1, (groups, -1)) * rstd_NG.unsqueeze(-1)).flatten(-2)
    return _gain(normed, weight_F, groups, x_NF.dtype)


def norm_backward(
    grad_NF: Tensor, skip_NF: Tensor | None, x_NF: Tensor, rstd_NG: Tensor, weight_F: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """(gradient of x, plus `skip` that bypassed the norm; gradient of the gain, wide)."""
    grouped, rstd = wide(x_NF).unflatten(-1, (groups, -1)), rstd_NG.unsqueeze(-1)
    normed = grouped * rstd
    grad_weight = (wide(grad_NF) * normed.flatten(-2)).sum(0)
    scaled = (wide(grad_NF) * wide(weight_F)).unflatten(-1, (groups, -1))
    grad = ((scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd).flatten(-2)
    if skip_NF is not None:
        grad = grad + wide(skip_NF)
    return grad.to(x_NF.dtype), grad_weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in half-split order (Su et al. 2021, GPT-NeoX): the pair (i, i + D/2) is turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_rotate(qkv_NGW: Tensor, cos_NE: Tensor, sin_NE: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, G, (R + 2) D] of rows [q of the group, k, v] -> q [N, G R, D], k [N, G, D], both rotated, and v.

    cos and sin are [N, D/2], wide.
    """
    q, k, v = _split(qkv_NGW, width)
    cos, sin = cos_NE[:, None, None], sin_NE[:, None, None]
    rotated_q = _rotate(wide(q), cos, sin).to(q.dtype)
    return rotated_q.flatten(1, 2), _rotate(wide(k), cos, sin).to(k.dtype).flatten(1, 2), v.flatten(1, 2).clone()


def split_rotate_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos_NE: Tensor, sin_NE: Tensor, groups: int
) -> Tensor:
    """Gradient of qkv [N, G, (R + 2) D]: turned back by the same angles."""
    cos, sin = cos_NE[:, None, None], -sin_NE[:, None, None]
    q, k = _rotate(wide(_grouped(grad_q, groups)), cos, sin), _rotate(wide(_grouped(grad_k, groups)), cos, sin)
    return torch.cat((q, k, wide(_grouped(grad_v, groups))), dim=2).flatten(2).to(grad_q.dtype)


def split_norm_rotate(
    qkv_NGW: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, eps: float, cos_NE: Tensor, sin_NE: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_rotate` with RMSNorm over each head of q and k before the rotation (Qwen3)."""
    q, k, v = _split(qkv_NGW, width)
    cos, sin = cos_NE[:, None, None], sin_NE[:, None, None]
    normed_q = wide(_gain(_normed(q, eps, 1)[0], q_weight_D, 1, q.dtype))
    normed_k = wide(_gain(_normed(k, eps, 1)[0], k_weight_D, 1, k.dtype))
    rotated_q = _rotate(normed_q, cos, sin).to(q.dtype)
    return rotated_q.flatten(1, 2), _rotate(normed_k, cos, sin).to(k.dtype).flatten(1, 2), v.flatten(1, 2).clone()


def split_norm_rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv_NGW: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_NE: Tensor,
    sin_NE: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of qkv, gradients of the two gains, wide)."""
    groups = qkv_NGW.shape[1]
    q, k, _ = _split(qkv_NGW, width)
    cos, sin = cos_NE[:, None, None], -sin_NE[:, None, None]
    found, gains = [], []
    for x, grad, weight in ((q, grad_q, q_weight_D), (k, grad_k, k_weight_D)):
        turned = _rotate(wide(_grouped(grad, groups)), cos, sin)
        normed, rstd = _normed(x, eps, 1)
        gains.append((turned * normed).sum((0, 1, 2)))
        scaled = turned * wide(weight)
        found.append((scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd)
    joined = torch.cat((*found, wide(_grouped(grad_v, groups))), dim=2)
    return joined.flatten(2).to(qkv_NGW.dtype), gains[0], gains[1]


def _split(qkv_NGW: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, G, R, D], k and v [N, G, 1, D], as views."""
    heads = qkv_NGW.unflatten(-1, (-1, width))
    return heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]


def _grouped(x_NHD: Tensor, groups: int) -> Tensor:
    return x_NHD.unflatten(1, (groups, -1))


def swiglu(gate_up_NI: Tensor) -> Tensor:
    """[N, 2 I] = [gate, up] -> silu(gate) * up (Shazeer 2020)."""
    gate, up = wide(gate_up_NI).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up_NI.dtype)


def swiglu_backward(grad_NI: Tensor, gate_up_NI: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of [gate, up], what `swiglu` gave), in one pass."""
    gate, up = wide(gate_up_NI).chunk(2, dim=-1)
    grad = wide(grad_NI)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    joined = torch.cat((grad_gate, grad * silu), dim=-1)
    return joined.to(gate_up_NI.dtype), (silu * up).to(gate_up_NI.dtype)


def rotary_angles(positions_N: Tensor, inverse_frequencies_E: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D/2] of the rotary angles, in the dtype of the frequencies."""
    angles = positions_N.to(inverse_frequencies_E.dtype)[:, None] * inverse_frequencies_E
    return angles.cos(), angles.sin()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of this module, compiled or not."""

    norm: Callable[..., tuple[Tensor, Tensor]]
    add_norm: Callable[..., tuple[Tensor, Tensor, Tensor]]
    norm_again: Callable[..., Tensor]
    norm_backward: Callable[..., tuple[Tensor, Tensor]]
    split_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]]
    split_rotate_backward: Callable[..., Tensor]
    split_norm_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]]
    split_norm_rotate_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    swiglu_backward: Callable[..., tuple[Tensor, Tensor]]


@cache
def kernels(compiled: bool = False) -> Kernels:
    """The functions; through torch.compile when `compiled`. A second token count makes that dimension dynamic."""

    def of(function: Any) -> Any:
        return torch.compile(function) if compiled else function

    return Kernels(**{name: of(globals()[name]) for name in Kernels.__dataclass_fields__})
