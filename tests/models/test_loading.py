"""Checkpoints in and out."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl360.errors import CheckpointError, ConfigError
from rl360.models.decoder import causal_attend
from rl360.models.hf_folder import replacing_folder
from rl360.models.loading import load_decoder, load_weights, save_hf

IDS = torch.tensor([5, 17, 3, 88, 41, 9])


def logits(decoder):
    with torch.no_grad():
        return decoder.logits(decoder.hidden(IDS, torch.arange(len(IDS)), causal_attend()))


def test_sharded_checkpoint_loads(hf_folder):
    folder, model = hf_folder("llama", max_shard_size="20KB", tie_word_embeddings=False)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        torch.testing.assert_close(logits(load_decoder(folder)), model(IDS[None]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_saved_folder_loads_in_transformers_and_again(hf_folder, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder, _ = hf_folder(kind, tie_word_embeddings=kind == "llama")
    (folder / "tokenizer.json").write_text("{}")
    decoder = load_decoder(folder)
    with torch.no_grad():
        decoder.model.layers[1].self_attn.k_proj.weight.add_(0.125)
    out = save_hf(decoder, tmp_path / "saved", source=folder)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(IDS[None]).logits[0], logits(decoder), atol=1e-5, rtol=1e-5)
    for name, parameter in load_decoder(out).named_parameters():
        assert torch.equal(parameter, decoder.get_parameter(name)), name
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "generation_config.json").is_file()


def test_save_replaces_an_older_folder_and_leaves_nothing_behind(hf_folder, tmp_path):
    folder, _ = hf_folder("llama")
    decoder = load_decoder(folder)
    out = tmp_path / "out"
    save_hf(decoder, out / "published", source=folder)
    (out / "published" / "stale.txt").write_text("old")
    save_hf(decoder, out / "published", source=folder)
    assert sorted(path.name for path in out.iterdir()) == ["published"]
    assert not (out / "published" / "stale.txt").exists()


@pytest.mark.parametrize(
    ("left", "reads"),
    [
        ({".hf.unfinished": "half", "hf": "old"}, "old"),  # killed as it wrote
        ({".hf.unfinished": "new", ".hf.replaced": "old"}, "old"),  # between the two renames
        ({".hf.replaced": "old", "hf": "new"}, "new"),  # before the old one was deleted
    ],
)
def test_what_a_killed_save_left_is_put_right_by_the_next(tmp_path, left, reads):
    """Of a model of 16 GB, each leftover is 16 GB; and the old folder is there again even if the next one fails."""
    for name, text in left.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(text)
    with suppress(RuntimeError), replacing_folder(tmp_path / "hf") as staging:
        assert list(staging.iterdir()) == []
        assert (tmp_path / "hf" / "weights").read_text() == reads
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    with replacing_folder(tmp_path / "hf") as staging:
        (staging / "weights").write_text("newest")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "weights").read_text() == "newest"


def test_failed_save_keeps_the_older_folder(hf_folder, tmp_path, monkeypatch):
    folder, _ = hf_folder("llama")
    decoder = load_decoder(folder)
    out = save_hf(decoder, tmp_path / "out" / "published", source=folder)
    before = (out / "model.safetensors").read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("rl360.models.loading.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(decoder, out, source=folder)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["published"]


def test_random_init_is_a_function_of_the_seed(hf_folder):
    folder, _ = hf_folder("llama")
    (folder / "model.safetensors").unlink()
    one, same, other = (load_decoder(folder, random_init_seed=seed) for seed in (3, 3, 4))
    weight = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(one.get_parameter(weight), same.get_parameter(weight))
    assert not torch.equal(one.get_parameter(weight), other.get_parameter(weight))
    assert one.get_parameter(weight).std().item() == pytest.approx(0.2, rel=0.05)
    assert torch.equal(one.model.norm.weight, torch.ones(48))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is in no file"),
        (lambda t: t.update({"model.layers.9.x": torch.ones(1)}), r"safetensors: tensor model\.layers\.9\.x is not in"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight has shape \[3\].*\[48\]"),
    ],
)
def test_misfit_names_the_tensor_and_changes_nothing(hf_folder, damage, message):
    folder, _ = hf_folder("llama")
    decoder = load_decoder(folder)
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    before = logits(decoder)
    with pytest.raises(CheckpointError, match=message):
        load_weights(decoder, folder)
    assert torch.equal(logits(decoder), before)


def test_missing_files_are_named(hf_folder, tmp_path):
    folder, _ = hf_folder("llama", max_shard_size="20KB")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=victim.name):
        load_decoder(folder)
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load_decoder(folder)
    with pytest.raises(ConfigError, match="not found"):
        load_decoder(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_decoder(folder)


def test_an_auto_map_that_names_nothing_costs_no_weights(hf_folder, tmp_path):
    """config.json is copied when all is trained; a key that only other readers look at must not end that."""
    folder, _ = hf_folder("llama")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "auto_map": ["modeling.Model"]}))
    out = save_hf(load_decoder(folder), tmp_path / "out", source=folder)
    assert json.loads((out / "config.json").read_text())["auto_map"] == ["modeling.Model"]


def test_dtype_follows_the_decoder(hf_folder, tmp_path):
    folder, _ = hf_folder("llama")
    decoder = load_decoder(folder, dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    out = save_hf(decoder, tmp_path / "half", source=folder)
    raw = json.loads((out / "config.json").read_text())
    assert "bfloat16" in (raw.get("dtype"), raw.get("torch_dtype"))


def another_head(folder, change: float, dtype=torch.float32) -> None:
    """Store a head beside the embedding of a tied model, in a file of its own."""
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, 0] += change
    save_file({"lm_head.weight": head.to(dtype)}, folder / "head.safetensors")
    names = load_file(folder / "model.safetensors")
    weight_map = dict.fromkeys(names, "model.safetensors") | {"lm_head.weight": "head.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_tied_models_stored_head_must_be_its_embedding(hf_folder):
    from rl360.models.weight_files import WeightFiles

    folder, _ = hf_folder("llama", tie_word_embeddings=True)
    expected = logits(load_decoder(folder))
    another_head(folder, 0.0, torch.float64)  # a copy, be it in another dtype
    decoder = load_decoder(folder)
    assert torch.equal(logits(decoder), expected)
    with WeightFiles(folder, decoder.config):  # Megatron's load and its conversion read through this
        pass
    another_head(folder, 1e-3)
    before = decoder.head_weight.clone()
    for read in (lambda: load_weights(decoder, folder), lambda: WeightFiles(folder, decoder.config)):
        with pytest.raises(CheckpointError, match=r"head\.safetensors: tensor lm_head\.weight differs from model"):
            read()
    assert torch.equal(decoder.head_weight, before)


def test_an_untied_model_has_a_head_of_its_own(hf_folder):
    folder, _ = hf_folder("llama", tie_word_embeddings=False)
    decoder = load_decoder(folder)
    assert not torch.equal(decoder.head_weight, decoder.model.embed_tokens.weight)
