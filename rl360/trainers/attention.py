"""Attention over a packed micro-batch: the `attend` that the trainer gives to the decoder.

In: the trees of a `MicroBatch`, then per layer q, k, v with rotary embedding applied. Out: attention outputs of the
same packing. Left to others: the layout (packing.py), projections (models/decoder.py).

On the CPU every tree is two dense calls: its prefix, and its branches padded to the longest one, which attend to
[prefix K/V ; own K/V]. On CUDA it is one call of a kernel for packed sequences, which has no shared prefix, so a
trainer on CUDA packs without sharing.

Axes: N packed tokens, H query heads, K key/value heads, D head width, B branches, L longest branch, P prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rl360.trainers.packing import Tree

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# Up to this many scores in one call, plain products and a softmax beat the fused CPU kernel; above it the scores no
# longer fit in the cache and keeping them for the backward pass costs memory.
MAX_PLAIN_SCORES = 2_000_000


class _Rearrange(torch.autograd.Function):
    """x[index]; backward is a gather too, since every row of x is used once (padding aside) at a known place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _Recomputed(torch.autograd.Function):
    """Run `compute(*inputs)` and keep only its inputs; backward computes it again.

    The padded copies and scores of a layer are three times its q, k and v, and cheap beside its projections.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.compute(*inputs)
        return None, *torch.autograd.grad(out, inputs, grad, allow_unused=True)


class _TreePlan:
    """Indices and mask of one tree, made once a micro-batch and used by every layer."""

    def __init__(self, tree: Tree, dtype: torch.dtype):
        lengths = torch.tensor(tree.branch_lengths)
        self.prefix_length = tree.prefix_length
        self.num_own = int(lengths.sum())
        self.num_branches, self.longest = len(lengths), int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        columns = torch.arange(self.longest)
        inside_BL = columns[None] < lengths[:, None]
        self.padded = bool((~inside_BL).any())
        # Padding repeats the tree's first own row; causal order hides it from real rows and its outputs are dropped.
        self.pad_index = torch.where(inside_BL, starts[:, None] + columns[None], 0).flatten()
        self.unpad_index = inside_BL.flatten().nonzero().flatten()
        self.mask_LC = _lower_right_causal_mask(self.longest, self.prefix_length + self.longest, dtype)

    def branches(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, prefix_k: Tensor, prefix_v: Tensor) -> Tensor:
        """Attention of the branches' own tokens, [own, H, D] from own q, k, v and the prefix's k, v [P, K, D]."""
        q, k, v = (self._pad(x) for x in (q_NHD, k_NKD, v_NKD))
        if self.prefix_length:
            shape = (self.num_branches, *prefix_k.shape)
            k = torch.cat((prefix_k.expand(shape), k), dim=1)
            v = torch.cat((prefix_v.expand(shape), v), dim=1)
        out = _masked(q, k, v, self.mask_LC).flatten(0, 1)
        return out.index_select(0, self.unpad_index) if self.padded else out

    def _pad(self, x: Tensor) -> Tensor:
        if self.padded:
            x = _Rearrange.apply(x, self.pad_index, self.unpad_index)
        return x.unflatten(0, (self.num_branches, self.longest))


def _lower_right_causal_mask(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """0 where row i may see column j <= i + columns - rows, -inf elsewhere."""
    return torch.full((rows, columns), float("-inf"), dtype=dtype).triu(1 + columns - rows)


def tree_attend(trees: SequenceABC[Tree], dtype: torch.dtype) -> Attend:
    """The CPU's `attend` for the trees of one micro-batch."""
    plans = [_TreePlan(tree, dtype) for tree in trees]
    sizes = [size for plan in plans for size in (plan.prefix_length, plan.num_own)]

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        outs = []
        parts = zip(q_NHD.split(sizes), k_NKD.split(sizes), v_NKD.split(sizes), strict=True)
        for plan in plans:
            prefix_qkv, own_qkv = next(parts), next(parts)
            if plan.prefix_length:
                outs.append(_causal(*prefix_qkv))
            outs.append(_Recomputed.apply(plan.branches, *own_qkv, *prefix_qkv[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return attend


def _causal(q_PHD: Tensor, k_PKD: Tensor, v_PKD: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_PHD, k_PKD, v_PKD))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _masked(q_BLHD: Tensor, k_BCKD: Tensor, v_BCKD: Tensor, mask_LC: Tensor) -> Tensor:
    """Attention of every branch to its C = P + L columns; returns [B, L, H, D]."""
    branches, rows, heads, width = q_BLHD.shape
    columns, kv_heads = k_BCKD.shape[1:3]
    if branches * heads * rows * columns > MAX_PLAIN_SCORES:
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BCKD, v_BCKD))
        # A square mask is plain causal order, in which the fused kernel skips what lies above the diagonal.
        mask = None if rows == columns else mask_LC
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2)
    shared = heads // kv_heads  # query heads of one key/value head; head h reads key/value head h // shared
    q = q_BLHD.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4).reshape(branches, kv_heads, shared * rows, width)
    scores = (q * width**-0.5) @ k_BCKD.permute(0, 2, 3, 1)
    weights = (scores.unflatten(2, (shared, rows)) + mask_LC).softmax(dim=-1)
    out = weights.flatten(2, 3) @ v_BCKD.transpose(1, 2)
    return out.unflatten(2, (shared, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def varlen_attend(trees: SequenceABC[Tree], device: torch.device) -> Attend:
    """CUDA's `attend` (bf16 or fp16): packed sequences, each causal. Trees must have no prefix."""
    from rl360.models.megatron.attention_cuda import attend_varlen

    assert all(tree.prefix_length == 0 for tree in trees), "varlen attention has no shared prefix"
    lengths = torch.tensor([length for tree in trees for length in tree.branch_lengths], dtype=torch.int32)
    bounds = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
    longest = int(lengths.max())

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        return attend_varlen(q_NHD, k_NKD, v_NKD, bounds, bounds, longest, longest)

    return attend
