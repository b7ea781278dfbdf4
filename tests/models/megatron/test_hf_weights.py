"""Hugging Face tensors against Megatron parameters: by hand, and against another way to compute the same."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from rl360.errors import CheckpointError
from rl360.models.decoder import DecoderConfig
from rl360.models.megatron import hf_weights
from rl360.models.megatron.hf_weights import (
    Part,
    hf_names,
    hf_tensors,
    load_hf,
    padded_vocab_size,
    parameter_shape,
    parts,
)
from rl360.models.weight_files import expected_tensors


def config_of(**changes: Any) -> DecoderConfig:
    numbers: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 7,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 32,
        "tie_word_embeddings": False,
    }
    return DecoderConfig(**{**numbers, **changes})


def test_qkv_by_hand():
    """4 query heads and 2 groups of width 2: 12 rows, [q0 q1 k0 v0] then [q2 q3 k1 v1]; rank 1 of 2 has the second."""
    name, prefix = "decoder.layers.1.self_attention.linear_qkv.weight", "model.layers.1.self_attn."
    assert parts(name, config_of(), 1, 2) == [
        Part(f"{prefix}q_proj.weight", 0, 4, 4, 0),
        Part(f"{prefix}k_proj.weight", 0, 2, 2, 4),
        Part(f"{prefix}v_proj.weight", 0, 2, 2, 6),
    ]
    assert parameter_shape(name, config_of(), 2) == (8, 4)


def test_gate_and_up_by_hand():
    """6 rows each; rank 1 of 2 has rows 3-5 of the gate and then rows 3-5 of up."""
    assert parts("decoder.layers.0.mlp.linear_fc1.weight", config_of(), 1, 2) == [
        Part("model.layers.0.mlp.gate_proj.weight", 0, 3, 3, 0),
        Part("model.layers.0.mlp.up_proj.weight", 0, 3, 3, 3),
    ]


def test_padded_vocabulary_of_k2_horizon():
    """facts: TP 1-2 250624, TP 4-8 250880."""
    assert [padded_vocab_size(250624, size) for size in (1, 2, 4, 8)] == [250624, 250624, 250880, 250880]
    config = config_of(vocab_size=130)  # padded to 256 x 1: rank 0 of 2 has 128 rows, rank 1 the last 2 and 126 zeros
    assert parts("output_layer.weight", config, 1, 2) == [Part("lm_head.weight", 0, 128, 2, 0)]
    assert parts("embedding.word_embeddings.weight", config_of(vocab_size=7), 1, 2) == []


@pytest.mark.parametrize("name", ["decoder.layers.2.mlp.linear_fc1.weight", "decoder.layers.0.mlp.router", "head"])
def test_an_unknown_parameter_is_refused(name):
    with pytest.raises(CheckpointError, match=name):
        parts(name, config_of())


# ---- another way to compute the same: whole matrices, reshaped and concatenated, then cut for the ranks


def random_hf(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_tensors(config).items()}


def megatron_reference(hf: dict[str, Tensor], config: DecoderConfig, rank: int, size: int) -> dict[str, Tensor]:
    heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim

    def vocabulary(weight: Tensor) -> Tensor:
        padding = padded_vocab_size(config.vocab_size, size) - config.vocab_size
        return torch.cat([weight, torch.zeros(padding, weight.shape[1])]).chunk(size)[rank]

    found = {"embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"])}
    for layer in range(config.num_layers):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q = hf[f"{source}self_attn.q_proj.weight"].view(groups, heads // groups * width, -1)
        k = hf[f"{source}self_attn.k_proj.weight"].view(groups, width, -1)
        v = hf[f"{source}self_attn.v_proj.weight"].view(groups, width, -1)
        found[f"{target}input_layernorm.weight"] = hf[f"{source}input_layernorm.weight"]
        found[f"{target}self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).chunk(size)[rank].flatten(0, 1)
        if config.qk_norm:
            for one in "qk":
                found[f"{target}self_attention.{one}_layernorm.weight"] = hf[f"{source}self_attn.{one}_norm.weight"]
        found[f"{target}self_attention.linear_proj.weight"] = hf[f"{source}self_attn.o_proj.weight"].chunk(size, 1)[
            rank
        ]
        found[f"{target}pre_mlp_layernorm.weight"] = hf[f"{source}post_attention_layernorm.weight"]
        halves = [hf[f"{source}mlp.{one}_proj.weight"].chunk(size)[rank] for one in ("gate", "up")]
        found[f"{target}mlp.linear_fc1.weight"] = torch.cat(halves)
        found[f"{target}mlp.linear_fc2.weight"] = hf[f"{source}mlp.down_proj.weight"].chunk(size, 1)[rank]
    found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = vocabulary(hf["lm_head.weight"])
    return found


class Stage(nn.Module):
    """Parameters under the names of a GPTModel that holds layers [first, last) of the whole."""

    def __init__(self, config: DecoderConfig, size: int, first: int, last: int, tied_head: bool = False):
        super().__init__()
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=i + 1) for i in range(first, last)])
        self.by_name: dict[str, nn.Parameter] = {}
        for name in hf_weights.parameter_names(config) + ([hf_weights.HEAD] if tied_head else []):
            if name.startswith(hf_weights.LAYERS):
                layer = int(name.split(".")[2])
                if not first <= layer < last:
                    continue
                local = name.replace(f"layers.{layer}.", f"layers.{layer - first}.", 1)
            elif (name == hf_weights.EMBEDDING and first > 0) or (
                name in (hf_weights.FINAL_NORM, hf_weights.HEAD) and last < config.num_layers
            ):
                continue
            else:
                local = name
            self.by_name[local] = nn.Parameter(torch.full(parameter_shape(name, config, size), torch.nan))

    def named_parameters(self, *args: Any, **kwargs: Any):  # type: ignore[override]
        return iter(self.by_name.items())


class Wrapped(nn.Module):
    """As Megatron's DDP wraps a model."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


class FakeGroup:
    """One process plays all tensor ranks: what `_gather` would collect is looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: list[list[nn.Module]]):
        self.shares = [dict(hf_weights.named_parameters(chunks)) for chunks in ranks]
        self.rank = 0
        monkeypatch.setattr(hf_weights, "_tensor_group", lambda layout: (self.rank, layout.tensor, None))
        monkeypatch.setattr(hf_weights, "_gather", self.gather)

    def gather(self, share: Tensor, size: int, group: object) -> list[Tensor]:
        (name,) = [n for n, p in self.shares[self.rank].items() if p.data_ptr() == share.data_ptr()]
        return [shares[name].detach() for shares in self.shares[:size]] if size > 1 else [share]


def write_hf(folder: Path, hf: dict[str, Tensor], num_files: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    names = list(hf)
    index = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number::num_files]
        save_file({name: hf[name].contiguous() for name in mine}, folder / file)
        index.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


FAMILIES = {
    "llama_tied": {"tie_word_embeddings": True},
    "llama_one_kv_group": {"num_kv_heads": 1, "num_heads": 3},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 3},
    "k2_horizon": {"model_type": "k2_horizon", "norm_groups": 2, "vocab_size": 131},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_there_and_back_is_bit_equal(tmp_path, monkeypatch, family, size, pipeline):
    config = config_of(**FAMILIES[family])
    if config.num_kv_heads % size:
        pytest.skip("fewer key/value groups than ranks: the layout refuses it")
    hf = random_hf(config)
    write_hf(tmp_path / "hf", hf)
    cuts = [0, 2] if pipeline == 1 else [0, 1, 2]
    back: dict[str, Tensor] = {}
    for first, last in pairwise(cuts):
        tied_head = config.tie_word_embeddings and first > 0
        ranks: list[list[nn.Module]] = [[Wrapped(Stage(config, size, first, last, tied_head))] for _ in range(size)]
        group = FakeGroup(monkeypatch, ranks)
        layout: Any = SimpleNamespace(tensor=size)
        for rank, chunks in enumerate(ranks):
            group.rank = rank
            load_hf(chunks, config, layout, tmp_path / "hf")
            reference = megatron_reference(hf, config, rank, size)
            reference["output_layer.weight"] = reference.get(
                "output_layer.weight", reference["embedding.word_embeddings.weight"]
            )
            for name, parameter in hf_weights.named_parameters(chunks):
                assert torch.equal(parameter, reference[name]), name
        group.rank = 0
        found = list(hf_tensors(ranks[0], config, layout))
        assert len(found) == len(dict(found)), "a tensor came twice"
        for chunks in ranks:
            assert list(hf_names(chunks, config, layout)) == list(dict(found))
        assert not set(back) & set(dict(found)), "two stages gave the same tensor"
        back.update(found)
    assert set(back) == set(hf)
    for name, value in hf.items():
        assert torch.equal(back[name], value), name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_element_is_covered_once(data):
    """Over all ranks, each element of each HF tensor is in exactly one place, and no two parts overlap."""
    size = data.draw(st.sampled_from([1, 2, 4]))
    groups = size * data.draw(st.integers(1, 3))
    config = config_of(
        num_kv_heads=groups,
        num_heads=groups * data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.integers(1, 4)),
        intermediate_size=size * data.draw(st.integers(1, 5)),
        vocab_size=data.draw(st.integers(1, 600)),
        hidden_size=data.draw(st.integers(1, 5)),
        tie_word_embeddings=data.draw(st.booleans()),
        qk_norm=data.draw(st.booleans()),
        num_layers=1,
    )
    seen = {name: torch.zeros(shape) for name, shape in expected_tensors(config).items()}
    for name in hf_weights.parameter_names(config):
        shared = 1 if hf_weights.is_replicated(name) else size
        for rank in range(shared):
            filled = torch.zeros(parameter_shape(name, config, shared))
            for part in parts(name, config, rank, shared):
                filled.narrow(part.axis, part.at, part.length).add_(1)
                seen[part.hf_name].narrow(part.axis, part.start, part.length).add_(1)
            assert filled.max() <= 1
            if name not in (hf_weights.EMBEDDING, hf_weights.HEAD):
                assert filled.min() == 1
    assert all(bool((times == 1).all()) for times in seen.values())


def test_misfits_name_the_first_tensor_and_its_file(tmp_path):
    config = config_of()
    layout: Any = SimpleNamespace(tensor=1)
    hf = random_hf(config)
    hf["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 4)
    write_hf(tmp_path, hf, 1)
    chunk = Stage(config, 1, 0, 2)
    with pytest.raises(CheckpointError, match=r"model-00001.*up_proj.weight has shape \[5, 4\].*gives \[6, 4\]"):
        load_hf([chunk], config, layout, tmp_path)
    assert all(torch.isnan(parameter).all() for _, parameter in chunk.named_parameters()), "something was copied"
    del hf["model.layers.1.mlp.up_proj.weight"]
    write_hf(tmp_path, hf, 1)
    with pytest.raises(CheckpointError, match=r"up_proj.weight is in no file \(1 missing"):
        load_hf([chunk], config, layout, tmp_path)
    write_hf(tmp_path, {**random_hf(config), "model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}, 1)
    with pytest.raises(CheckpointError, match=r"q_proj.bias is not in a llama of this config"):
        load_hf([chunk], config, layout, tmp_path)
