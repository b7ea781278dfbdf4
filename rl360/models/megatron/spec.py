"""The layer spec: which modules hold a layer's parameters, and how they are run.

In: a `TransformerConfig` of Megatron's. Out: `TransformerBlockSubmodules` for its GPTModel. The modules are Megatron's
own, so names, tensor-parallel attributes and sharded state dicts are those that its tools know; Transformer Engine is
not needed. Left to others: the computation (blocks.py, attention.py), the model around the layers (model.py), the same
layer of Transformer Engine's modules (te_spec.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from rl360.models.megatron.attention import attend
from rl360.models.megatron.blocks import Setting, norm_column, row, split_rotate, swiglu_row
from rl360.models.megatron.packed import PackedTensors

# Checkpoints of Megatron's other layer specs keep a norm's gain with the product that follows it. Grouped norms have no
# such spec and stay under their own name.
FUSED_NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class NormGain(nn.Module):
    """The gain of an RMSNorm; the blocks compute with it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron sums the gradients of such parameters over tensor ranks, each of which saw its own tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class NoModule(nn.Module):
    """Stands where Megatron's attention expects a core attention; `attend` is a function here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Layer(TransformerLayer):
    """One decoder layer. Set up by `model.build_model`: `setting`, `context_group`, `recompute`."""

    setting: Setting
    context_group: ProcessGroup | None
    recompute: str

    def forward(self, x: Tensor, y: Tensor | None, packed: PackedTensors, cos: Tensor, sin: Tensor) -> Any:
        """(x, y) -> (x, y), whose sum is the residual stream [N, F]: the next norm adds them in its own pass.

        `y` is None at the start of a stage. With recompute "full" only x + y is kept of the whole layer.
        """
        if self.recompute == "full" and torch.is_grad_enabled():
            x = x if y is None else x + y
            return checkpoint(self._compute, x, None, packed, cos, sin, use_reentrant=False, preserve_rng_state=False)
        return self._compute(x, y, packed, cos, sin)

    def _compute(
        self, x: Tensor, y: Tensor | None, packed: PackedTensors, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        attention, setting = self.self_attention, self.setting
        x, qkv = norm_column(x, y, self.input_layernorm.weight, attention.linear_qkv.weight, setting)
        gains = None
        if self.config.qk_layernorm:
            gains = (attention.q_layernorm.weight, attention.k_layernorm.weight)
        groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        q, k, v = split_rotate(qkv, gains, cos, sin, width, groups, setting)
        if self.recompute == "core_attn" and torch.is_grad_enabled():
            out = checkpoint(attend, q, k, v, packed, self.context_group, use_reentrant=False, preserve_rng_state=False)
        else:
            out = attend(q, k, v, packed, self.context_group)
        assert isinstance(out, Tensor)
        y = row(out.flatten(1), attention.linear_proj.weight, setting)
        x, gate_up = norm_column(x, y, self.pre_mlp_layernorm.weight, self.mlp.linear_fc1.weight, setting)
        return x, swiglu_row(gate_up, self.mlp.linear_fc2.weight, setting)


def block_spec(
    config: TransformerConfig,
    chunk: int | None,
    layer: type[Layer],
    *,
    column: Any,
    row: Any,
    core: Any,
    norm: Any,
    last_norm: Any,
    checkpoint_names: Mapping[str, str] | None = None,
) -> TransformerBlockSubmodules:
    """Submodules of the decoder of model chunk `chunk` (None: not interleaved) on this pipeline rank.

    Args:
        column, row: products, split over tensor ranks by output and by input.
        core: the attention itself.
        norm: before attention and MLP; `last_norm`: behind all layers.
        checkpoint_names: of parameters that Megatron's checkpoints have under another name.
    """
    head_norm = NormGain if config.qk_layernorm else None  # gains for `split_rotate`
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=core,
            linear_proj=row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    of_layer = ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=IdentityFuncOp,
            pre_mlp_layernorm=norm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
                ffn_hidden_size=config.ffn_hidden_size,
            ),
            mlp_bda=IdentityFuncOp,
            sharded_state_dict_keys_map=dict(checkpoint_names or {}),
        ),
    )
    layers = [of_layer] * get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=last_norm)


def decoder_spec(config: TransformerConfig, norm_groups: int, chunk: int | None) -> TransformerBlockSubmodules:
    """`block_spec` of Megatron's own modules."""
    return block_spec(
        config,
        chunk,
        Layer,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        core=NoModule,
        norm=NormGain,
        last_norm=NormGain,
        checkpoint_names=FUSED_NORM_NAMES if norm_groups == 1 else None,
    )
