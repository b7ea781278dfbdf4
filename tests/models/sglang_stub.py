"""The parts of sglang.srt.models.llama that the external package touches, on one CPU process: for tests without SGLang.

In: what SGLang would give (configuration, HF-named tensors). Out: logits of one sequence. As in SGLang 0.5.16: the
constructor's arguments, where the norms hang, that a norm with a residual returns (normed, sum), packed qkv_proj and
gate_up_proj filled from q, k, v, gate, up, theta from rope_parameters, and a warning only for an unknown tensor.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl360.models.decoder import causal_attend, rotary_table, rotate

PACKED = (
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", 0),
    (".gate_up_proj", ".up_proj", 1),
)


class PPMissingLayer(nn.Identity):
    """What a pipeline stage has in the place of another's layer."""


class PlainNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))  # zeros: a norm that was not replaced is noticed

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        raise AssertionError("SGLang's own norm was called")


class Packed(nn.Module):
    def __init__(self, sizes: dict[Any, int], columns: int):
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.zeros(sum(sizes.values()), columns))

    def load(self, tensor: Tensor, part: Any) -> None:
        start = sum(list(self.sizes.values())[: list(self.sizes).index(part)])
        self.weight.data[start : start + self.sizes[part]].copy_(tensor)

    def forward(self, x: Tensor) -> Any:
        return (x @ self.weight.T).split(list(self.sizes.values()), dim=-1)


class LlamaAttention(nn.Module):
    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        parameters = getattr(config, "rope_parameters", None)
        self.theta = (parameters or {}).get("rope_theta", 10000)
        query, key = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.qkv_proj = Packed({"q": query, "k": key, "v": key}, config.hidden_size)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))
        cos, sin = (t[positions].unsqueeze(1) for t in rotary_table(len(positions), self.head_dim, self.theta))
        out = causal_attend()(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.flatten(-2))


class LlamaMLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.gate_up_proj = Packed({0: config.intermediate_size, 1: config.intermediate_size}, config.hidden_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        return self.down_proj(functional.silu(gate) * up)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = PlainNorm(config.hidden_size)
        self.post_attention_layernorm = PlainNorm(config.hidden_size)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    stage = range(10**6)  # the layers of this pipeline stage

    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer) if layer in self.stage else PPMissingLayer()
            for layer in range(config.num_hidden_layers)
        )
        last = config.num_hidden_layers - 1 in self.stage
        self.norm: nn.Module = PlainNorm(config.hidden_size) if last else PPMissingLayer()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        assert quant_config is None
        assert prefix == ""
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.model(ids, positions))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for packed, part, key in PACKED:
                if part in name:
                    self.get_submodule(name.replace(part, packed).removesuffix(".weight")).load(tensor, key)
                    break
            else:
                if name in parameters:
                    assert parameters[name].shape == tensor.shape
                    parameters[name].data.copy_(tensor)
                else:
                    warnings.warn(f"Parameter {name} not found in params_dict", stacklevel=2)


def modules() -> dict[str, ModuleType]:
    """sys.modules entries under which the package finds these classes."""
    names = ("sglang", "sglang.srt", "sglang.srt.models", "sglang.srt.models.llama")
    stubs = {name: ModuleType(name) for name in names}
    stubs["sglang.srt.models.llama"].__dict__.update(
        {name: value for name, value in vars(sys.modules[__name__]).items() if name.startswith("Llama")}
    )
    return stubs
