"""Gradients of weights, added where the optimizer reads them.

In: a weight and its gradient, or the two factors of it. Out: `weight.main_grad` (fp32, Megatron's gradient buffer) has
it; a weight without such a buffer gets an ordinary gradient from autograd. Left to others: reducing the buffers over
ranks (Megatron, told through `on_gradient` when a weight's gradient is complete), the backward formulas (blocks.py).

One product that reads bf16 and adds to fp32 saves writing, reading and rounding a whole bf16 gradient per micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl360.models.linear import linear


def add_product(weight: Any, grad_NO: Tensor, x_NI: Tensor) -> Tensor | None:
    """Add grad.T @ x to the weight's gradient buffer and return None; without a buffer return it, in x's dtype."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return linear(grad_NO.t(), x_NI.t())
    accumulate_product(buffer, grad_NO, x_NI)
    tell_complete(weight)
    return None


def accumulate_product(buffer_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """buffer += grad.T @ x, in one product on CUDA: its inputs in their dtype, its sum in the buffer's."""
    if buffer_OI.is_cuda and buffer_OI.dtype != x_NI.dtype:
        torch.addmm(buffer_OI, grad_NO.t(), x_NI, out_dtype=buffer_OI.dtype, out=buffer_OI)
    elif buffer_OI.is_cuda:
        buffer_OI.addmm_(grad_NO.t(), x_NI)
    else:
        buffer_OI += linear(grad_NO.t(), x_NI.t())


def add(weight: Any, grad: Tensor) -> Tensor | None:
    """Add a gradient (any float dtype) to the weight's buffer and return None; without a buffer return it, cast."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return grad.to(weight.dtype)
    buffer += grad
    tell_complete(weight)
    return None


def add_rows(weight: Any, rows_N: Tensor, grad_NI: Tensor) -> Tensor | None:
    """As `add`, for a gradient that is zero but for `grad[n]` at row `rows[n]`: an embedding's."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return torch.zeros_like(weight).index_add_(0, rows_N, grad_NI.to(weight.dtype))
    buffer.index_add_(0, rows_N, grad_NI.to(buffer.dtype))
    tell_complete(weight)
    return None


def tell_complete(weight: Any) -> None:
    """The gradient of this micro-batch is in the weight's buffer; whoever set `on_gradient` may send it now."""
    told = getattr(weight, "on_gradient", None)
    if told is not None:
        told()


class _CompleteInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Any, ...]) -> Tensor:
        ctx.weights = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for weight in ctx.weights:
            tell_complete(weight)
        return grad, None


def complete_in_backward(x: Tensor, weight: Any) -> Tensor:
    """x; its backward pass tells that the gradient of `weight`, added by other means, is in its buffer.

    In the backward pass and not at once, because the schedules mark a step's last micro-batch only there.
    """
    return _CompleteInBackward.apply(x, (weight,))
