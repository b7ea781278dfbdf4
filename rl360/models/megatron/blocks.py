"""The products of a layer with what surrounds them, as autograd functions that keep little and gather late.

In: activations of one rank, weights as Megatron's modules hold them. Out: activations, and in the backward pass weight
gradients where wgrad.py puts them. Left to others: attention (attention.py), the order of the blocks (spec.py).

Kept for the backward pass: the residual stream before each norm (its rms beside it), qkv where a norm follows, and
[gate; up]. The normalised input of a product and the activated input of the last one are computed again, each in the
pass that reads its source anyway, so keeping them would cost memory and save nothing.

Tensor parallelism is Megatron's (Shoeybi et al. 2019; with sequence parallelism Korthikanti et al. 2022): rows of the
output, then columns of the input; between two such products each rank has all tokens, or its share of them when
sequence parallel. In the backward pass communication runs beside the product that does not need it.

Axes: N tokens of a rank between products (its share when sequence parallel), T tokens inside, F features, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rl360.models.linear import linear
from rl360.models.megatron import wgrad
from rl360.models.megatron.pointwise import Kernels


@dataclass(frozen=True, slots=True)
class Setting:
    """What the blocks of one model share."""

    kernels: Kernels
    eps: float
    norm_groups: int
    group: ProcessGroup | None  # tensor parallelism; None: one rank
    sequence_parallel: bool

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()


def gather_rows(x_NF: Tensor, setting: Setting, async_op: bool = False) -> tuple[Tensor, Any]:
    """(tokens of all tensor ranks, handle to wait for) where tokens are split; (x, None) where not."""
    if not setting.sequence_parallel:
        return x_NF, None
    whole = x_NF.new_empty((x_NF.shape[0] * setting.size, *x_NF.shape[1:]))
    return whole, distributed.all_gather_into_tensor(whole, x_NF.contiguous(), setting.group, async_op)


def reduce_rows(x_TF: Tensor, setting: Setting, async_op: bool = False) -> tuple[Tensor, Any]:
    """(the sum over tensor ranks, of this rank's tokens where they are split; handle). May overwrite x."""
    if setting.group is None:
        return x_TF, None
    if not setting.sequence_parallel:
        return x_TF, distributed.all_reduce(x_TF, group=setting.group, async_op=async_op)
    own = x_TF.new_empty((x_TF.shape[0] // setting.size, *x_TF.shape[1:]))
    return own, distributed.reduce_scatter_tensor(own, x_TF.contiguous(), group=setting.group, async_op=async_op)


def _wait(handle: Any) -> None:
    if handle is not None:
        handle.wait()


class _NormColumn(torch.autograd.Function):
    """(x + y, norm(x + y) @ weight.T); without y only the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, gain: Tensor, weight: Tensor, setting: Setting) -> Any:
        kernels = setting.kernels
        if y is None:
            normed, rstd = kernels.norm(x, gain, setting.eps, setting.norm_groups)
        else:
            x, normed, rstd = kernels.add_norm(x, y, gain, setting.eps, setting.norm_groups)
        whole, _ = gather_rows(normed, setting)
        out = linear(whole, weight)
        ctx.save_for_backward(x, rstd)
        ctx.gain, ctx.weight, ctx.setting, ctx.added = gain, weight, setting, y is not None
        return (x, out) if ctx.added else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd = ctx.saved_tensors
        gain, weight, setting = ctx.gain, ctx.weight, ctx.setting
        skip, grad = grads if ctx.added else (None, grads[0])
        needs_weight = ctx.needs_input_grad[3]
        gathered = None
        if needs_weight:
            normed = setting.kernels.norm_again(x, rstd, gain, setting.norm_groups)
            normed, gathered = gather_rows(normed, setting, async_op=True)
        grad_normed = linear(grad, weight.t())
        _wait(gathered)
        grad_normed, reduced = reduce_rows(grad_normed, setting, async_op=True)
        grad_weight = wgrad.add_product(weight, grad, normed) if needs_weight else None
        _wait(reduced)
        grad_x, grad_gain = setting.kernels.norm_backward(grad_normed, skip, x, rstd, gain, setting.norm_groups)
        return (
            grad_x,
            grad_x if ctx.added else None,
            wgrad.add(gain, grad_gain) if ctx.needs_input_grad[2] else None,
            grad_weight,
            None,
        )


class _Row(torch.autograd.Function):
    """x @ weight.T, summed over tensor ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, setting: Setting) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.setting = weight, setting
        return reduce_rows(linear(x, weight), setting)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad, _ = gather_rows(grad, ctx.setting)
        grad_x = linear(grad, ctx.weight.t())
        return grad_x, wgrad.add_product(ctx.weight, grad, x) if ctx.needs_input_grad[1] else None, None


class _SwiGLURow(torch.autograd.Function):
    """swiglu([gate, up]) @ weight.T, summed over tensor ranks."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, setting: Setting) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.weight, ctx.setting = weight, setting
        return reduce_rows(linear(setting.kernels.swiglu(gate_up), weight), setting)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        grad, _ = gather_rows(grad, ctx.setting)
        grad_gate_up, x = ctx.setting.kernels.swiglu_backward(linear(grad, ctx.weight.t()), gate_up)
        return grad_gate_up, wgrad.add_product(ctx.weight, grad, x) if ctx.needs_input_grad[1] else None, None


class _SplitRotate(torch.autograd.Function):
    """qkv [T, G, (R + 2) D] -> q, k (rotated), v; without norms nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, width: int, setting: Setting) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.groups, ctx.setting = qkv.shape[1], setting
        return setting.kernels.split_rotate(qkv, cos, sin, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.setting.kernels.split_rotate_backward(*grads, *ctx.saved_tensors, ctx.groups), None, None, None, None


class _SplitNormRotate(torch.autograd.Function):
    """As `_SplitRotate`, with norms of q and k; keeps qkv."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, width: int, setting: Setting
    ) -> Any:
        ctx.save_for_backward(qkv, cos, sin)
        ctx.q_gain, ctx.k_gain, ctx.width, ctx.setting = q_gain, k_gain, width, setting
        return setting.kernels.split_norm_rotate(qkv, q_gain, k_gain, setting.eps, cos, sin, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin = ctx.saved_tensors
        grad, q_grad, k_grad = ctx.setting.kernels.split_norm_rotate_backward(
            *grads, qkv, ctx.q_gain, ctx.k_gain, ctx.setting.eps, cos, sin, ctx.width
        )
        needs_q, needs_k = ctx.needs_input_grad[1:3]
        return (
            grad,
            wgrad.add(ctx.q_gain, q_grad) if needs_q else None,
            wgrad.add(ctx.k_gain, k_grad) if needs_k else None,
            None,
            None,
            None,
            None,
        )


class _AddNorm(torch.autograd.Function):
    """norm(x + y): the last norm of the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gain: Tensor, setting: Setting) -> Tensor:
        total, normed, rstd = setting.kernels.add_norm(x, y, gain, setting.eps, setting.norm_groups)
        ctx.save_for_backward(total, rstd)
        ctx.gain, ctx.setting = gain, setting
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd = ctx.saved_tensors
        setting = ctx.setting
        grad_x, grad_gain = setting.kernels.norm_backward(grad, None, total, rstd, ctx.gain, setting.norm_groups)
        return grad_x, grad_x, wgrad.add(ctx.gain, grad_gain) if ctx.needs_input_grad[2] else None, None


class _Embed(torch.autograd.Function):
    """Rows `ids` of an embedding whose rows are split over tensor ranks, from `first_row` on here."""

    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight: Tensor, first_row: int, setting: Setting) -> Tensor:
        ctx.weight, ctx.setting = weight, setting
        if setting.group is None:
            ctx.save_for_backward(ids_T)
            return weight.index_select(0, ids_T)
        here = (ids_T >= first_row) & (ids_T < first_row + weight.shape[0])
        local = torch.where(here, ids_T - first_row, 0)
        ctx.save_for_backward(local, here)
        return reduce_rows(weight.index_select(0, local).mul_(here[:, None]), setting)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, *here = ctx.saved_tensors
        grad, _ = gather_rows(grad, ctx.setting)
        if here:
            grad = grad * here[0][:, None]
        return None, wgrad.add_rows(ctx.weight, local, grad), None, None


class _GatherHidden(torch.autograd.Function):
    """Hidden states of all tokens for a head that is split over tensor ranks; gradients come back as partial sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, setting: Setting) -> Tensor:
        ctx.setting = setting
        whole, _ = gather_rows(x, setting)
        return whole if setting.sequence_parallel else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The gradient belongs to whoever calls; an all-reduce in place must not change it under another reader.
        whole = grad.clone() if ctx.setting.group is not None and not ctx.setting.sequence_parallel else grad
        return reduce_rows(whole, ctx.setting)[0], None


def norm_column(x: Tensor, y: Tensor | None, gain: Tensor, weight: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """(x + y, norm(x + y) @ weight.T [T, O]); y None counts as zero. x, y: [N, F]."""
    if y is None:
        return x, _NormColumn.apply(x, None, gain, weight, setting)
    return _NormColumn.apply(x, y, gain, weight, setting)


def row(x_TO: Tensor, weight: Tensor, setting: Setting) -> Tensor:
    """x @ weight.T over the columns of all tensor ranks -> [N, F]."""
    return _Row.apply(x_TO, weight, setting)


def swiglu_row(gate_up: Tensor, weight: Tensor, setting: Setting) -> Tensor:
    """swiglu([gate, up] [T, 2 I]) @ weight.T over all tensor ranks -> [N, F]."""
    return _SwiGLURow.apply(gate_up, weight, setting)


def split_rotate(
    qkv: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    width: int,
    groups: int,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, G (R + 2) D] -> q [T, G R, D], k, v [T, G, D]; norms of q and k where `gains` has their weights."""
    grouped = qkv.unflatten(-1, (groups, -1))
    if gains is None:
        return _SplitRotate.apply(grouped, cos, sin, width, setting)
    return _SplitNormRotate.apply(grouped, *gains, cos, sin, width, setting)


def add_norm(x: Tensor, y: Tensor, gain: Tensor, setting: Setting) -> Tensor:
    return _AddNorm.apply(x, y, gain, setting)


def embed(ids_T: Tensor, weight: Tensor, first_row: int, setting: Setting) -> Tensor:
    """Embeddings [N, F] of all T token ids."""
    return _Embed.apply(ids_T, weight, first_row, setting)


def gather_hidden(x_NF: Tensor, setting: Setting) -> Tensor:
    """Hidden states of all T tokens; each tensor rank returns its part of their gradient, which is summed."""
    return x_NF if setting.group is None else _GatherHidden.apply(x_NF, setting)
