"""Parts of a layer whose backward pass computes again what it could have kept: less memory, and less of it to touch.

In: activations and weights of one layer, fp32 or fp64 on the CPU. Out: the same values as the plain expressions
beside each function, differentiable once. Saved are the inputs only; what is computed again is elementwise, a few
percent of the matrix products around it. Other devices keep the plain expressions: their kernels have fusions of
their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rl360.models.linear import gradients, linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    if x.device.type == "cpu" and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def swiglu_down(gate: Tensor, up: Tensor, down_weight: Tensor) -> Tensor:
    """(silu(gate) * up) @ down_weight.T."""
    if gate.device.type == "cpu" and torch.is_grad_enabled() and gate.requires_grad:
        return _SwiGLUDown.apply(gate, up, down_weight)
    return linear(functional.silu(gate) * up, down_weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        grad_weight = (grad * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        scaled = grad * weight
        grad_x = scaled.sub_(normed.mul_((scaled * normed).mean(-1, keepdim=True))).mul_(rstd)
        return grad_x, grad_weight, None


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(functional.silu(gate).mul_(up), weight.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        rows = (silu * up).reshape(-1, silu.shape[-1])
        grad_rows, grad_weight = gradients(grad, rows, weight, True, ctx.needs_input_grad[2])
        grad_product = grad_rows.view_as(gate)
        grad_up = grad_product * silu
        # d silu = sigmoid + silu * (1 - sigmoid)
        slope = silu.mul_(1 - sigmoid).add_(sigmoid)
        return slope.mul_(up).mul_(grad_product), grad_up, grad_weight
