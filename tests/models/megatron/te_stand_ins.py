"""Stand-ins of megatron-core's Transformer Engine modules on a CPU: what te_spec.py relies on, in plain torch.

They take the arguments that Megatron's builders give, have the parameters' names of the real ones, and follow the
contract of gradients: with `fuse_wgrad_accumulation` a weight's goes into its `main_grad`, and autograd gets nothing,
or garbage where the weight bears `grad_added_to_main_grad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAMES = {}  # of megatron.core.extensions.transformer_engine -> stand-in


def stand_in(cls: type) -> type:
    cls.__module__ = "transformer_engine.pytorch"
    NAMES[f"TE{cls.__name__}"] = cls
    return cls


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, fused: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.fused = weight, fused
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        of_weight: Tensor | None = grad.T @ x
        if ctx.fused:
            weight.main_grad += of_weight
            of_weight = None
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad, of_weight = True, torch.full_like(weight, torch.nan)
        return grad @ weight, of_weight, None


class _Linear(nn.Module):
    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool, **_: Any) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return _Product.apply(x, self.weight, self.fuse_wgrad_accumulation), None


@stand_in
class ColumnParallelLinear(_Linear): ...


@stand_in
class RowParallelLinear(_Linear): ...


@stand_in
class LayerNormColumnParallelLinear(_Linear):
    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


@stand_in
class Norm(nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@stand_in
class DotProductAttention(nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None, mask_type: Any, packed_seq_params: Any) -> Tensor:
        assert (mask, mask_type.name, packed_seq_params.qkv_format) == (None, "causal", "thd")
        bounds = packed_seq_params.cu_seqlens_q
        assert torch.equal(bounds, packed_seq_params.cu_seqlens_kv)
        lengths = bounds.diff().tolist()
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == max(lengths)
        outs = []
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            one = (part.transpose(0, 1)[None] for part in parts)
            out = functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outs)
