"""Attention of one context rank's part of a packed stream.

In: q, k, v of this rank's tokens, rotated. Out: attention outputs of the same tokens. Left to others: projections
(blocks.py), which tokens are whose (packed.py), the kernel on CUDA (attention_cuda.py).

With context parallelism K and V of all ranks are gathered and laid in the order of the stream; their gradients are
summed back. With grouped heads K and V are a small part of what a layer holds, and every chunk's attention is then one
plain call. On the CPU each sequence is one call of scaled_dot_product_attention.

Axes: L tokens of this rank, N of the stream, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from rl360.models.megatron.packed import DeviceSpan, PackedTensors


def attend(q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, packed: PackedTensors, group: ProcessGroup | None) -> Tensor:
    """Causal attention inside each sequence. `group` is the context-parallel one; None: this rank has all tokens."""
    if group is not None:
        k_LKD, v_LKD = _GatherStream.apply(k_LKD, v_LKD, group)
    outs = []
    for span in packed.spans:
        bounds = span.bounds
        q = q_LHD[bounds.query_start : bounds.query_stop]
        keys = slice(bounds.key_start, bounds.key_stop)
        outs.append(_attend_span(q, k_LKD[keys], v_LKD[keys], span))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_span(q: Tensor, k: Tensor, v: Tensor, span: DeviceSpan) -> Tensor:
    bounds = span.bounds
    if q.is_cuda:
        from rl360.models.megatron.attention_cuda import attend_varlen

        return attend_varlen(q, k, v, span.cu_q, span.cu_k, bounds.max_q, bounds.max_k)
    outs = []
    for s in range(len(bounds.cu_q) - 1):
        q_rows, k_rows = slice(*bounds.cu_q[s : s + 2].tolist()), slice(*bounds.cu_k[s : s + 2].tolist())
        outs.append(_causal(q[q_rows], k[k_rows], v[k_rows]))
    return torch.cat(outs)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence; the last query sees every key, the one before it all but the last, and so on."""
    queries, keys = q.shape[0], k.shape[0]
    mask = None
    if queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


class _GatherStream(torch.autograd.Function):
    """k and v of all context ranks in the order of the stream; their gradients are summed back to their ranks."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        size, (length, *heads) = group.size(), k.shape
        own = torch.stack((k, v)).view(2, 2, length // 2, *heads)  # k or v, which chunk, tokens
        ranks = own.new_empty((size, *own.shape))
        distributed.all_gather_into_tensor(ranks.flatten(0, 1), own, group=group)
        # Rank r has chunks r and 2 size - 1 - r: the first ones ascend with the rank, the second ones descend.
        stream = torch.cat((ranks[:, :, 0], ranks[:, :, 1].flip(0))).transpose(0, 1).flatten(1, 2)
        return stream[0], stream[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        size = ctx.group.size()
        chunks = torch.stack(grads).unflatten(1, (2 * size, -1)).transpose(0, 1)
        ranks = torch.stack((chunks[:size], chunks[size:].flip(0)), dim=2).contiguous()
        own = ranks.new_empty(ranks.shape[1:])
        distributed.reduce_scatter_tensor(own, ranks.flatten(0, 1), group=ctx.group)
        k, v = own.flatten(1, 2)
        return k, v, None
