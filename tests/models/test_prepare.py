"""Preparing K2 Horizon: what changes, what does not, what is refused. A tiny model in the 7B's published form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl360.errors import ConfigError
from rl360.models import prepare as preparing
from rl360.models.catalogue import shipped_model
from rl360.models.prepare import main, prepare
from rl360.models.tiny import write_tiny

EXPECT = {"model_type": "k2_horizon", "architectures": ["K2HorizonForCausalLM"], "hidden_size": 48, "rope_theta": 1e7}


def change(path: Path, drop: tuple[str, ...] = (), **values: Any) -> None:
    raw = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in drop}))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A tiny model with the metadata of the hub's: transformers 5's spellings, and code that only it can run."""
    folder = write_tiny(tmp_path / "download", "k2_horizon")
    auto_map = {
        "AutoConfig": "configuration_k2_horizon.K2HorizonConfig",
        "AutoModelForCausalLM": "modeling_k2_horizon.K2HorizonForCausalLM",
    }
    change(folder / "config.json", ("rope_theta",), auto_map=auto_map, transformers_version="5.9.0", dtype="bfloat16")
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="TokenizersBackend",
        extra_special_tokens=["<|ifm|im_start|>"],
    )
    (folder / "configuration_k2_horizon.py").write_text("from transformers import NothingThatTransformers4Has\n")
    (folder / "modeling_k2_horizon.py").write_text("from .configuration_k2_horizon import K2HorizonConfig\n")
    (folder / "README.md").write_text("about it\n")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "book").write_text("the hub client's\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_weights_vocabulary_and_template_are_the_same_files(published, tmp_path):
    before = contents(published)
    out = prepare(published, tmp_path / "ready", EXPECT)
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json", "README.md"):
        assert (out / name).samefile(published / name), name
    assert contents(published) == before
    assert not (out / "modeling_k2_horizon.py").exists()
    assert not (out / ".cache").exists()
    written = {"config.json", "configuration_k2_horizon.py", "tokenizer_config.json", "rl360_model.json"}
    assert {path.name for path in out.iterdir() if path.stat().st_nlink == 1} == written


def test_metadata_says_the_same_for_older_readers(published, tmp_path):
    old = json.loads((published / "config.json").read_text())
    new = json.loads((prepare(published, tmp_path / "ready", EXPECT) / "config.json").read_text())
    changed = {key for key in old | new if old.get(key) != new.get(key)}
    assert changed == {"rope_theta", "torch_dtype", "auto_map"}
    assert (new["rope_theta"], new["rope_parameters"]["rope_theta"]) == (1e7, 1e7)
    assert new["torch_dtype"] == new["dtype"] == "bfloat16"
    assert new["auto_map"] == {"AutoConfig": "configuration_k2_horizon.K2HorizonConfig"}
    old = json.loads((published / "tokenizer_config.json").read_text())
    new = json.loads((tmp_path / "ready" / "tokenizer_config.json").read_text())
    assert new["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert new["additional_special_tokens"] == old["extra_special_tokens"]
    assert new["chat_template"] == old["chat_template"]


@pytest.mark.parametrize("place", ["top", "inside"])
def test_theta_is_found_in_either_place(published, tmp_path, place):
    if place == "top":
        change(published / "config.json", rope_theta=1e7, rope_parameters={"rope_type": "default"})
    new = json.loads((prepare(published, tmp_path / "ready", EXPECT) / "config.json").read_text())
    assert new["rope_theta"] == 1e7
    assert new["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}


def test_transformers_reads_it_without_rl360(published, tmp_path):
    """In a process of its own: there nobody has registered the model."""
    out = prepare(published, tmp_path / "ready", EXPECT)
    code = (
        "import sys; from transformers import AutoConfig, AutoTokenizer\n"
        "c = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "theta = c.rope_parameters['rope_theta'] if hasattr(c, 'rope_parameters') else c.rope_theta\n"
        "print(c.model_type, c.layernorm_num_groups, theta, c.head_dim, len(t), 'rl360' in sys.modules)\n"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    size = json.loads((out / "config.json").read_text())["vocab_size"]
    assert done.stdout.split() == ["k2_horizon", "4", "10000000.0", "8", str(size), "False"], done.stderr


def test_the_prepared_folder_is_the_model(published, tmp_path):
    import torch

    from rl360.models.decoder import causal_attend
    from rl360.models.k2_horizon_hf import register
    from rl360.models.loading import load_decoder

    register()
    from transformers import AutoModelForCausalLM

    out = prepare(published, tmp_path / "ready", EXPECT)
    ids = torch.tensor([7, 30, 12, 99])
    decoder = load_decoder(published)
    with torch.no_grad():
        expected = decoder.logits(decoder.hidden(ids, torch.arange(4), causal_attend()))
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        torch.testing.assert_close(model(ids[None]).logits[0], expected, atol=2e-5, rtol=2e-5)


def test_files_are_copied_across_file_systems(published, tmp_path, monkeypatch):
    def other_file_system(*args: Any, **kwargs: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    lines: list[str] = []
    out = prepare(published, tmp_path / "ready", EXPECT, progress=lines.append)
    assert (out / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert not (out / "model.safetensors").samefile(published / "model.safetensors")
    assert any(line.startswith("copied") and "model.safetensors" in line for line in lines)


def test_a_hub_caches_links_are_followed(published, tmp_path):
    blob = tmp_path / "blob"
    (published / "model.safetensors").rename(blob)
    (published / "model.safetensors").symlink_to(blob)
    out = prepare(published, tmp_path / "ready", EXPECT)
    assert not (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").samefile(blob)


def refused(source: Path, folder: Path, expect: dict[str, Any] | None = None) -> list[str]:
    """What is wrong, and that nothing was made of it."""
    around = sorted(folder.parent.iterdir()), contents(folder) if folder.is_dir() else None
    with pytest.raises(ConfigError) as caught:
        prepare(source, folder, EXPECT if expect is None else expect)
    assert (sorted(folder.parent.iterdir()), contents(folder) if folder.is_dir() else None) == around
    return caught.value.problems


def test_an_existing_folder_is_refused_even_an_empty_one(published, tmp_path):
    (tmp_path / "ready").mkdir()
    assert refused(published, tmp_path / "ready") == [
        f"{tmp_path / 'ready'}: is there already; expected a new folder, nothing is overwritten"
    ]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is there already" in refused(published, tmp_path / "link")[0]
    assert any("is there already" in problem for problem in refused(published, published))


def test_the_tiny_one_is_not_the_7b(published, tmp_path):
    problems = refused(published, tmp_path / "ready", shipped_model("k2_horizon_7b")["expect"])
    assert f"{published / 'config.json'}: hidden_size is 48; expected 4096" in problems
    assert f"{published / 'config.json'}: num_hidden_layers is 2; expected 36" in problems
    assert not any("model_type" in problem or "layernorm_num_groups" in problem for problem in problems)


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: change(f / "config.json", model_type="llama"), 'model_type is "llama"; expected "k2_horizon"'),
        (lambda f: change(f / "config.json", architectures=["X"]), 'architectures is ["X"]'),
        (lambda f: change(f / "config.json", rope_parameters={"rope_type": "default"}), "rope_theta is null"),
        (lambda f: change(f / "config.json", num_experts=8), "num_experts is 8; the feed-forward part is dense here"),
        (lambda f: change(f / "config.json", vocab_size=400), "tensor lm_head.weight has shape [3"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json: not found"),
        (lambda f: change(f / "tokenizer_config.json", tokenizer_class="GPT2"), "tokenizer_class is 'GPT2'"),
        (
            lambda f: (f / "tokenizer_config.json").write_text("[]"),
            "tokenizer_config.json: a list; expected a JSON object",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "model.safetensors.index.json: not JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": []}'), "index.json: no weight_map"),
        (lambda f: change(f / "config.json", num_attention_heads="six"), 'num_attention_heads is "six"'),
        (broken_index, "no model-2.safetensors"),
        (truncated, "its header says"),
    ],
)
def test_another_or_a_broken_download_is_refused(published, tmp_path, damage: Callable[[Path], None], said: str):
    damage(published)
    problems = refused(published, tmp_path / "ready")
    assert any(said in problem and str(published) in problem for problem in problems), problems


def test_no_source_and_a_folder_inside_it(published, tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere", tmp_path / "ready")[0]
    assert "inside the download" in refused(published, published / "ready")[0]


@pytest.mark.parametrize("step", ["_link", "_sync", "checkpoint_differences"])
def test_a_failure_midway_leaves_nothing(published, tmp_path, monkeypatch, step):
    calls = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if step == "checkpoint_differences" and len(calls) == 1:
            return []  # of the source; the second is of the result
        raise OSError("disk full")

    monkeypatch.setattr(preparing, step, fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(published, tmp_path / "ready", EXPECT)
    assert not (tmp_path / "ready").exists()
    assert not list(tmp_path.glob(".ready.staging-*"))


def test_the_command(published, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "hard links" in capsys.readouterr().out
    monkeypatch.setattr(preparing, "shipped_model", lambda name: {"expect": EXPECT})
    monkeypatch.setenv("RL360_MODELS", str(tmp_path / "models"))
    assert main([str(published)]) == 0
    assert (tmp_path / "models" / "k2_horizon_7b" / "config.json").is_file()
    out = capsys.readouterr().out
    assert "linked   model.safetensors" in out
    assert "rl360 check model=k2_horizon_7b" in out
