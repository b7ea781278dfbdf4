"""Grouped RMSNorm as SGLang's layers call their norms: alone, or with the residual added first.

In: hidden states [tokens, width], perhaps the residual of the same shape. Out: normed states, and the new residual. A
Triton kernel on CUDA (one program a token and group, so the result does not depend on the batch), plain torch
elsewhere. The sum is rounded to the activations' dtype before it is normed, as in the model that was trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupedRMSNorm(nn.Module):
    """Each of `groups` slices over its own root mean square, times the weight in fp32, cast last (K2 Horizon)."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        if width % groups:
            raise ValueError(f"{width} values do not divide into {groups} norm groups")
        self.weight = nn.Parameter(torch.ones(width))
        self.groups = groups
        self.variance_epsilon = eps  # SGLang's name for it: its fusions look there

    def forward(
        self, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Without a residual: the normed x. With one: (normed sum, sum); the sum is written over `residual`."""
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition
        if x.numel() == 0:
            return x if residual is None else (x, residual)
        if x.is_cuda:
            return _on_cuda(x, residual, self.weight, self.groups, self.variance_epsilon)
        if residual is not None:
            x = residual.copy_(x + residual)
        grouped = x.float().unflatten(-1, (self.groups, -1))
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.variance_epsilon)
        normed = ((grouped * scale).flatten(-2) * self.weight.float()).to(x.dtype)
        return normed if residual is None else (normed, x)


def _on_cuda(
    x: Tensor, residual: Tensor | None, weight: Tensor, groups: int, eps: float
) -> Tensor | tuple[Tensor, Tensor]:
    from rl360.models.sglang_external.kernels.grouped_norm import grouped_rms_norm  # Triton is there where CUDA is

    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    group_width = shape[-1] // groups
    block = 1 << (group_width - 1).bit_length()  # Triton's ranges are powers of two
    grouped_rms_norm[(rows.shape[0], groups)](
        rows,
        out if residual is None else residual,
        weight,
        out,
        rows.stride(0),
        shape[-1],
        group_width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
    )
    normed = out.view(shape)
    return normed if residual is None else (normed, residual)
