"""Tiny random checkpoints, written by transformers itself, for parity tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and a wrong mask shows
}


def make_hf_model(kind: str, **changes: Any) -> Any:
    """A transformers model with norms away from 1 and distinct values everywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    numbers = {**TINY, **changes}
    if kind == "llama":
        numbers.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 5000.0})
        model = LlamaForCausalLM(LlamaConfig(**numbers))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16, **numbers}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    def make(kind: str, max_shard_size: str = "5GB", **changes: Any) -> tuple[Path, Any]:
        model = make_hf_model(kind, **changes)
        folder = tmp_path / kind
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder, model

    return make
