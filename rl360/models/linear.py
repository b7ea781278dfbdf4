"""x @ w.T on the CPU, as fast as the machine allows and exact fp32 on every one; forward and backward.

In: activations [..., in] and weights [out, in]. Out: products, differentiable in both. For fp32 on the CPU the work
goes to oneDNN, called directly: the linear of torch asks MKL, which is 2-3x slower on AMD. Weights are read where they
lie, never packed or copied. docs/decisions/0002-cpu-linear.md has the measurements and what else was tried. Other
devices, other dtypes and autocast are left to the linear of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# For this many rows oneDNN is faster with the operands exchanged: (w @ x.T).T. Its kernel wants the right operand with
# the summed axis outermost; exchanging makes that reordering concern the few activations and not the whole weight.
EXCHANGE_MIN_ROWS, EXCHANGE_MAX_ROWS = 9, 96
# Above this many outputs (an LM head) transposing the result back costs more than the exchange saves.
EXCHANGE_MAX_OUT = 16384

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x [..., in] times w [out, in] transposed -> [..., out]."""
    if not _fast(x, w):
        return functional.linear(x, w)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _Linear.apply(x, w)
    return _product(x.reshape(-1, x.shape[-1]), w.detach()).view(*x.shape[:-1], w.shape[0])


def joined_linear(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`linear` with several weights that share an input -> one result each.

    Weights that lie one after the other in memory (as Decoder allocates q, k, v and gate, up) take one product.
    """
    joined = as_one(weights)
    if joined is None:
        return tuple(linear(x, w) for w in weights)
    if torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights)):
        if not _fast(x, joined):
            return tuple(linear(x, w) for w in weights)
        out = _JoinedLinear.apply(x, joined, *weights)
    else:
        out = linear(x, joined)
    return out.split([w.shape[0] for w in weights], dim=-1)


def _fast(x: Tensor, w: Tensor) -> bool:
    return (
        _HAS_ONEDNN
        and x.dtype == w.dtype == torch.float32
        and x.device.type == w.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights [out_i, in] as one view [sum out_i, in] of their common memory, or None if they do not touch."""
    first = weights[0]
    width, dtype = first.shape[1], first.dtype
    address = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    rows = 0
    for w in weights:
        if (
            w.data_ptr() != address
            or w.untyped_storage().data_ptr() != storage
            or w.dtype != dtype
            or not w.is_contiguous()
        ):
            return None
        rows += w.shape[0]
        address += w.numel() * w.element_size()
    return first.detach().as_strided((rows, width), (width, 1))


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def _product(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """[N, in] by [out, in] -> [N, out], contiguous."""
    if EXCHANGE_MIN_ROWS <= x_NI.shape[0] <= EXCHANGE_MAX_ROWS and w_OI.shape[0] <= EXCHANGE_MAX_OUT:
        return _onednn(w_OI, x_NI).t().contiguous()
    return _onednn(x_NI, w_OI)


def gradients(grad: Tensor, x_NI: Tensor, w_OI: Tensor, need_x: bool, need_w: bool) -> tuple[Any, Any]:
    """Gradients of x @ w.T to x [N, in] and to w [out, in], None where not needed."""
    if not _fast(grad, w_OI):
        grad_NO = grad.reshape(-1, grad.shape[-1])
        return grad_NO @ w_OI if need_x else None, grad_NO.t() @ x_NI if need_w else None
    # Transposed views go in as they are; only expanded ones (from a sum) have strides that oneDNN cannot take.
    grad_NO = grad.reshape(-1, grad.shape[-1])
    if 0 in grad_NO.stride():
        grad_NO = grad_NO.contiguous()
    grad_x = _onednn(grad_NO, w_OI.t()) if need_x else None
    grad_w = _onednn(grad_NO.t(), x_NI.t()) if need_w else None
    return grad_x, grad_w


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _product(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grad_x, grad_w = gradients(grad, x.reshape(-1, x.shape[-1]), w, *ctx.needs_input_grad)
        return grad_x.view_as(x) if grad_x is not None else None, grad_w


class _JoinedLinear(torch.autograd.Function):
    """As `_Linear`, with the weights' common view for the products and the weights themselves for the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joined: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return _product(x.reshape(-1, x.shape[-1]), joined).view(*x.shape[:-1], joined.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        joined = as_one(weights)
        assert joined is not None, "weights were moved between forward and backward"
        need_x, _, *need_weights = ctx.needs_input_grad
        grad_x, grad_w = gradients(grad, x.reshape(-1, x.shape[-1]), joined, need_x, any(need_weights))
        parts: Sequence[Tensor | None] = [None] * len(weights)
        if grad_w is not None:
            parts = grad_w.split([w.shape[0] for w in weights])
        return (
            grad_x.view_as(x) if grad_x is not None else None,
            None,
            *(part if needed else None for part, needed in zip(parts, need_weights, strict=True)),
        )
