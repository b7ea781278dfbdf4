"""What each tensor-parallel rank of an SGLang server holds of a checkpoint, in SGLang 0.5.16's own layout.

In: a checkpoint's tensors under their HF names. Out: the parameter of SGLang that each goes into, and the slice of it
that rank r of n has. The families are those of rl360.models.architecture; a name of no such parameter is None, not a
guess. Hashing slices and comparing them is left to rl360.weight_sync.buckets.

From SGLang's layers/linear.py (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear) and
layers/vocab_parallel_embedding.py, unquantized, without attention of its own data parallelism and without stages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

VOCAB_MULTIPLE = 64  # rows of an embedding or a head on SGLang's side; those that no token has are zeros
WHOLE, ROWS, COLUMNS, HEADS, VOCABULARY = "whole", "rows", "columns", "heads", "vocabulary"
# SGLang's name in a layer -> how ranks share it, and the checkpoint's names for what it keeps one after the other.
_LAYER = {
    "input_layernorm": (WHOLE, ("input_layernorm",)),
    "post_attention_layernorm": (WHOLE, ("post_attention_layernorm",)),
    "self_attn.q_norm": (WHOLE, ("self_attn.q_norm",)),
    "self_attn.k_norm": (WHOLE, ("self_attn.k_norm",)),
    "self_attn.qkv_proj": (HEADS, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "self_attn.o_proj": (COLUMNS, ("self_attn.o_proj",)),
    "mlp.gate_up_proj": (ROWS, ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.down_proj": (COLUMNS, ("mlp.down_proj",)),
}
_OUTSIDE = {"model.embed_tokens": VOCABULARY, "model.norm": WHOLE, "lm_head": VOCABULARY}
_HOLDER = {part: name for name, (_, parts) in _LAYER.items() for part in parts}
_NAME = re.compile(r"(model\.layers\.\d+\.)(.+)\.weight|(.+)\.weight")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of SGLang's model: its name, the HF names of what is in it in order, and how ranks share it."""

    name: str
    parts: tuple[str, ...]
    shared: str


@lru_cache(maxsize=8192)
def parameter_with(hf_name: str) -> Parameter | None:
    """The parameter that a checkpoint's tensor goes into; None: this layout does not know it."""
    found = _NAME.fullmatch(hf_name)
    if found is None:
        return None
    prefix, inner, outer = found.groups()
    if outer is not None:
        return Parameter(hf_name, (hf_name,), _OUTSIDE[outer]) if outer in _OUTSIDE else None
    holder = _HOLDER.get(inner)
    if holder is None:
        return None
    shared, parts = _LAYER[holder]
    return Parameter(f"{prefix}{holder}.weight", tuple(f"{prefix}{part}.weight" for part in parts), shared)


@lru_cache(maxsize=8192)
def parameter_named(name: str) -> Parameter | None:
    """The parameter that SGLang calls so; None: this layout does not know it."""
    found = _NAME.fullmatch(name)
    if found is not None and found[1] is not None and found[2] in _LAYER:
        return parameter_with(f"{found[1]}{_LAYER[found[2]][1][0]}.weight")
    return parameter_with(name) if found is not None and found[3] in _OUTSIDE else None


def held_by(parameter: Parameter, parts: Sequence[Tensor], rank: int, ways: int, kv_heads: int | None) -> Tensor | None:
    """What rank `rank` of `ways` holds of a parameter: a view where it can be one.

    Args:
        parts: the whole tensors of `parameter.parts`; matrices [output, input], norms [width].
        kv_heads: key/value heads of the model. On more ranks than that each head is on several of them.

    Returns:
        None: it does not divide so, or `kv_heads` would have to be known.
    """
    first = parts[0]
    match parameter.shared:
        case "whole":
            return first
        case "columns":
            return None if first.shape[1] % ways else _part(first, 1, rank, ways)
        case "vocabulary":
            return _vocabulary(first, rank, ways)
        case "rows":
            shares = [(rank, ways)] * len(parts)
        case "heads":
            if ways == 1:
                shares = [(0, 1)] * len(parts)
            elif kv_heads is None or (ways % kv_heads and kv_heads % ways):
                return None
            else:
                groups = min(ways, kv_heads)
                shares = [(rank, ways)] + [(rank // (ways // groups), groups)] * (len(parts) - 1)
        case _:
            raise AssertionError(parameter.shared)
    if any(part.shape[0] % count for part, (_, count) in zip(parts, shares, strict=True)):
        return None
    return torch.cat([_part(part, 0, *share) for part, share in zip(parts, shares, strict=True)])


def _part(tensor: Tensor, dim: int, at: int, count: int) -> Tensor:
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, at * size, size)


def _vocabulary(tensor: Tensor, rank: int, ways: int) -> Tensor | None:
    """Rows are filled up to a multiple, and then shared evenly: a last rank may hold nothing but zeros."""
    rows = tensor.shape[0]
    padded = -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % ways:
        return None
    share = padded // ways
    held = tensor[min(rank * share, rows) : min((rank + 1) * share, rows)]
    missing = share - held.shape[0]
    return held if missing == 0 else torch.cat([held, held.new_zeros(missing, *tensor.shape[1:])])
