"""The package for SGLang that lacks K2 Horizon: against transformers, through SGLang's own conventions (a stub's)."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl360.errors import ConfigError
from rl360.models import sglang_external
from rl360.models.k2_horizon_hf import GroupedRMSNorm as Reference
from rl360.models.k2_horizon_hf import K2HorizonConfig, K2HorizonForCausalLM
from rl360.models.sglang_external.grouped_norm import GroupedRMSNorm
from rl360.models.tiny import write_tiny
from tests.models import sglang_stub

IDS = torch.tensor([5, 17, 3, 88, 41, 9, 60, 22])


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class as SGLang's registry finds it: every plain module of the package imported, `EntryClass` taken."""
    for name, module in sglang_stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rl360.models.sglang_external.k2_horizon", raising=False)
    found: dict[str, type] = {}
    for _, name, is_package in pkgutil.iter_modules(sglang_external.__path__, sglang_external.__name__ + "."):
        if not is_package:
            module = importlib.import_module(name)
            if hasattr(module, "EntryClass"):
                found[module.EntryClass.__name__] = module.EntryClass
    assert list(found) == ["K2HorizonForCausalLM"]
    yield found["K2HorizonForCausalLM"]
    sys.modules.pop("rl360.models.sglang_external.k2_horizon", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "k2", "k2_horizon", seed=11, layers=3)


def config_of(folder: Path, **changes: Any) -> K2HorizonConfig:
    return K2HorizonConfig.from_pretrained(folder, **changes)


def test_it_computes_what_transformers_computes(entry, folder):
    served = entry(config=config_of(folder), quant_config=None)
    tensors = load_file(folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served.load_weights(iter(tensors.items()))
    model = K2HorizonForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    torch.testing.assert_close(served(IDS, torch.arange(len(IDS))), expected, atol=5e-5, rtol=5e-5)
    assert expected.std() > 0.5


def test_an_update_of_some_tensors_is_an_update(entry, folder):
    served = entry(config=config_of(folder))
    tensors = load_file(folder / "model.safetensors")
    served.load_weights(iter(tensors.items()))
    before = served(IDS, torch.arange(len(IDS)))
    name = "model.layers.1.input_layernorm.weight"
    served.load_weights(iter([(name, tensors[name] * 2)]))
    assert torch.equal(served.model.layers[1].input_layernorm.weight, tensors[name] * 2)
    assert not torch.allclose(served(IDS, torch.arange(len(IDS))), before)


def test_an_unknown_tensor_is_an_error_not_a_warning(entry, folder):
    served = entry(config=config_of(folder))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.qkv_proj.weight is not in this K2 Horizon"):
        served.load_weights(iter([("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(1))]))


def test_theta_reaches_the_rotary_embedding_from_either_spelling(entry, folder):
    old = config_of(folder)
    old.rope_parameters = {"rope_type": "default"}  # what older transformers leave: theta at the top only
    old.rope_theta = 1e7
    for config in (config_of(folder), old):
        assert entry(config=config).model.layers[0].self_attn.theta == 1e7


def test_a_sister_that_is_not_computed_is_refused_before_it_is_built(entry, folder):
    with pytest.raises(ConfigError, match="query_key_norm is true"):
        entry(config=config_of(folder, query_key_norm=True))


def test_a_pipeline_stage_replaces_only_what_it_holds(entry, folder, monkeypatch):
    monkeypatch.setattr(sglang_stub.LlamaModel, "stage", range(1, 2))
    served = entry(config=config_of(folder))
    norms = {name for name, module in served.named_modules() if isinstance(module, GroupedRMSNorm)}
    assert norms == {"model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_with_and_without_a_residual(dtype):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 24, generator=generator).to(dtype) for _ in range(2))
    norm, reference = GroupedRMSNorm(24, 4, 1e-6).to(dtype), Reference(24, 4, 1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(24, generator=generator) + 0.5)
        reference.weight.copy_(norm.weight)
        bits = 2**-8 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(norm(x), reference(x), atol=bits, rtol=bits)
        kept = residual.clone()
        normed, total = norm(x, residual)
        assert torch.equal(total, x + kept)
        assert total is residual  # written in place, as SGLang's own does
        torch.testing.assert_close(normed, reference(x + kept), atol=bits, rtol=bits)
        assert norm(x[:0]).shape == (0, 24)
        with pytest.raises(ValueError, match="do not divide"):
            GroupedRMSNorm(10, 4, 1e-6)


def test_the_triton_kernel_in_its_interpreter():
    """Where Triton is installed, CUDA or not; on CUDA itself benchmarks/h200/k2_sglang.py compares it."""
    pytest.importorskip("triton")
    code = """
import torch
from rl360.models.sglang_external import grouped_norm
generator = torch.Generator().manual_seed(0)
for width, groups in ((48, 4), (64, 2), (96, 4), (8, 1)):
    norm = grouped_norm.GroupedRMSNorm(width, groups, 1e-6)
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    x, residual = (torch.randn(5, width, generator=generator) for _ in range(2))
    sliced = torch.randn(5, 2 * width, generator=generator)[:, :width]
    run = lambda x, r: grouped_norm._on_cuda(x, r, norm.weight, groups, 1e-6)
    torch.testing.assert_close(run(x, None), norm(x))
    torch.testing.assert_close(run(sliced, None), norm(sliced))
    normed, total = run(x, residual.clone())
    expected, sum_ = norm(x, residual.clone())
    torch.testing.assert_close(normed, expected)
    assert torch.equal(total, sum_)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_which_sglang_needs_it():
    for version in ("0.5.16", "0.5.19.post1", "0.4.10"):
        assert sglang_external.server_environment("k2_horizon", version) == {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "rl360.models.sglang_external"
        }
        assert sglang_external.server_flags("k2_horizon", version) == ["--trust-remote-code"]
    for model_type, version in (("k2_horizon", "0.5.20"), ("k2_horizon", "0.6.0"), ("qwen3", "0.5.16")):
        assert sglang_external.server_environment(model_type, version) == {}
        assert sglang_external.server_flags(model_type, version) == []


def test_choosing_needs_neither_sglang_nor_torch():
    code = (
        "import sys; from rl360.models.sglang_external import server_environment as e; e('k2_horizon', '0.5.16')\n"
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
