"""K2 Horizon for transformers: a Llama whose three kinds of norm are grouped. The reference for every other code path.

In: a `K2HorizonConfig`, or a checkpoint folder through AutoModelForCausalLM once `register()` was called. Out: a
transformers model: forward, loss, generation with a KV cache, save_pretrained. Engine and trainer use
rl360.models.decoder instead (one copy of the weights, packed sequences); this one shares no code with it, which is what
makes comparing them worth something. The checkpoint's own remote code is not used: it needs a transformers of its time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from rl360.models.k2_horizon_config import K2HorizonConfig


class GroupedRMSNorm(nn.Module):
    """Each of `groups` contiguous slices of the last axis divided by its own root mean square, then times the weight.

    All in fp32, with one cast at the end; Llama's norm casts before it multiplies. One group is a plain RMSNorm with
    that late cast. Input and output [..., width] in the input's dtype; weight [width], centred at one.
    """

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        if width % groups:
            raise ValueError(f"{width} values do not divide into {groups} groups")
        self.weight = nn.Parameter(torch.ones(width))
        self.groups = groups
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.to(torch.float32).reshape(*hidden.shape[:-1], self.groups, -1)
        x = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x.reshape(hidden.shape) * self.weight.to(torch.float32)).to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, groups={self.groups}, eps={self.eps}"


def _group_norms(model: LlamaModel, config: K2HorizonConfig) -> None:
    """Replace the norms of a Llama: two a layer, and the last. All are as wide as the hidden states."""

    def norm() -> GroupedRMSNorm:
        return GroupedRMSNorm(config.hidden_size, config.layernorm_num_groups or 1, config.rms_norm_eps)

    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
    model.norm = norm()  # type: ignore[assignment]  # declared as Llama's


class K2HorizonPreTrainedModel(LlamaPreTrainedModel):
    config_class = K2HorizonConfig

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedRMSNorm):
            nn.init.ones_(module.weight)


class K2HorizonModel(K2HorizonPreTrainedModel, LlamaModel):
    """The decoder without a head: Llama's layers and rotary embedding, grouped norms."""

    def __init__(self, config: K2HorizonConfig) -> None:
        super().__init__(config)
        _group_norms(self, config)


class K2HorizonForCausalLM(K2HorizonPreTrainedModel, LlamaForCausalLM):
    """With the output matrix: logits, loss, generate()."""

    def __init__(self, config: K2HorizonConfig) -> None:
        super().__init__(config)
        _group_norms(self.model, config)


def register() -> None:
    """Let transformers' Auto classes make these for model_type k2_horizon. A second call changes nothing."""
    AutoConfig.register(K2HorizonConfig.model_type, K2HorizonConfig, exist_ok=True)
    AutoModel.register(K2HorizonConfig, K2HorizonModel, exist_ok=True)
    AutoModelForCausalLM.register(K2HorizonConfig, K2HorizonForCausalLM, exist_ok=True)
