"""A Llama-like decoder that the embedded engine and the torch trainer share: one object, one copy of the weights.

In: packed token ids and their positions, and an `attend` callable. Out: final hidden states and, through `head_weight`,
logits. Attention itself is left to the caller, because the engine's reads and writes a KV cache while the trainer's is
a packed one; the checkpoint on disk is left to rl360.models.loading.

Parameter names are those of Hugging Face's Llama and Qwen3, so `state_dict()` is a checkpoint. Axes: N packed tokens of
any number of sequences, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute_in_backward

from rl360.models.architecture import SUPPORTED_MODEL_TYPES, DecoderConfig
from rl360.models.final_logits import final_logits
from rl360.models.fused import rms_norm, swiglu_down
from rl360.models.linear import as_one, joined_linear, linear

__all__ = ["SUPPORTED_MODEL_TYPES", "Attend", "Decoder", "DecoderConfig", "RMSNorm", "causal_attend"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_NHD, k_NKD, v_NKD) -> out_NHD. Rotary embedding is already applied to q and k."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (Zhang and Sennrich 2019).

    `groups` > 1 normalises that many contiguous slices of the last axis apart, and then multiplies by the weight in
    fp32 before casting back, as K2 Horizon does; Llama casts first.
    """

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            if x.dtype in (torch.float32, torch.float64):
                return rms_norm(x, self.weight, self.eps)
            normed = nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
            return self.weight * normed.to(x.dtype)
        grouped = x.float().unflatten(-1, (self.groups, -1))
        normed = nn.functional.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)


class Projection(nn.Module):
    """A weight matrix [out, in] without bias. A module of its own only so that the name ends in `.weight`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def _adjacent_projections(out_widths: Sequence[int], in_width: int) -> list[Projection]:
    """Projections that lie one after the other in one allocation, so that one product computes all of them."""
    return [Projection(part) for part in torch.empty(sum(out_widths), in_width).split(list(out_widths))]


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = _adjacent_projections((q_width, kv_width, kv_width), config.hidden_size)
        self.o_proj = Projection(torch.empty(config.hidden_size, q_width))
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = joined_linear(x, (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_proj, self.up_proj = _adjacent_projections((width, width), config.hidden_size)
        self.down_proj = Projection(torch.empty(config.hidden_size, width))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joined_linear(x, (self.gate_proj.weight, self.up_proj.weight))
        return swiglu_down(gate, up, self.down_proj.weight)


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_groups)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_groups)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Model(nn.Module):
    """Only the `model.` prefix of the checkpoint names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Projection(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_groups)


class Decoder(nn.Module):
    """The decoder. Built empty; `rl360.models.loading.load_decoder` fills it from a checkpoint or from a seed."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Model(config)
        if not config.tie_word_embeddings:
            self.lm_head = Projection(torch.empty(config.vocab_size, config.hidden_size))
        self._rotary: tuple[Tensor, Tensor] | None = None  # cos, sin [positions so far, D]

    @torch.no_grad()
    def join_projections(self) -> None:
        """Put q, k, v and gate, up next to each other in memory again, after something has moved them apart."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            attention, mlp = layer.self_attn, layer.mlp
            for group in (
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (mlp.gate_proj, mlp.up_proj),
            ):
                weights = [projection.weight for projection in group]
                if as_one(weights) is None:
                    parts = torch.cat([w.data for w in weights]).split([w.shape[0] for w in weights])
                    for weight, part in zip(weights, parts, strict=True):
                        weight.data = part

    def _apply(self, fn: Any, recurse: bool = True) -> Decoder:
        # .to(), .double() and the like give every parameter memory of its own.
        super()._apply(fn, recurse)
        self.join_projections()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        for key, value in self.__dict__.items():
            clone.__dict__[key] = copy.deepcopy(value, memo)
        clone.join_projections()
        return clone

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, hidden]; the embedding itself when the two are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def hidden(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, checkpoint: bool = False) -> Tensor:
        """Final hidden states [N, hidden], after the last norm, of N packed tokens.

        `token_ids_N` and `positions_N` are int64 on the decoder's device. `attend` decides which tokens see which, and
        is called once per layer, in order; in the backward pass too when `checkpoint`, which keeps only each layer's
        input and computes the layer again (torch.utils.checkpoint).
        """
        cos, sin = self._cos_sin(positions_N)
        x = nn.functional.embedding(token_ids_N, self.model.embed_tokens.weight)
        for layer in self.model.layers:
            if checkpoint and torch.is_grad_enabled():
                x = recompute_in_backward(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def logits(self, hidden_N: Tensor, fp32: bool = False) -> Tensor:
        """[N, hidden] -> [N, V]. Callers that need only a logprob should not hold all of it at once.

        fp32: those of narrower weights are not rounded to the weights' dtype, and have no graph.
        """
        return final_logits(hidden_N, self.head_weight, True) if fp32 else linear(hidden_N, self.head_weight)

    def _cos_sin(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D] of the rotary angles, fp32, from a table that grows with the longest position seen."""
        needed = int(positions_N.max()) + 1 if positions_N.numel() else 1
        table = self._rotary
        if table is None or table[0].shape[0] < needed or table[0].device != positions_N.device:
            # The engine may be the first to come here, in inference mode; the trainer needs an ordinary tensor.
            with torch.inference_mode(False), torch.no_grad():
                # Doubling: a sequence that grows token by token makes few tables.
                size = max(needed, 1024, 0 if table is None else 2 * table[0].shape[0])
                cos, sin = rotary_table(size, self.config.head_dim, self.config.rope_theta)
                table = self._rotary = (cos.to(positions_N.device), sin.to(positions_N.device))
        return table[0][positions_N].unsqueeze(1), table[1][positions_N].unsqueeze(1)


def rotary_table(num_positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D] in fp32, half-split layout (Su et al. 2021, in GPT-NeoX's order)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Apply the rotary embedding: the pair (i, i + D/2) of each head is turned by its position's angle.

    cos and sin are fp32 (or wider): rounded to a narrower x they would turn by another angle. Returns x's dtype.
    """
    first, second = x_NHD.chunk(2, dim=-1)
    return (x_NHD * cos_N1D + torch.cat((-second, first), dim=-1) * sin_N1D).to(x_NHD.dtype)


def causal_attend(lengths: Sequence[int] | None = None) -> Attend:
    """The plain reading of `attend`: sequences of the given lengths packed one after the other, each causal.

    None: all N tokens are one sequence. Used for references and tests; engine and trainer bring their own.
    """

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        sizes = [q_NHD.shape[0]] if lengths is None else list(lengths)
        outs = []
        for q, k, v in zip(q_NHD.split(sizes), k_NKD.split(sizes), v_NKD.split(sizes), strict=True):
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    return attend
