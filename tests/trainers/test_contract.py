"""`rl360.protocols.Trainer`: the same cases on every trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rl360.algorithms.grpo import GRPO
from rl360.errors import CheckpointError, NonFiniteGradient
from rl360.protocols import Trainer
from rl360.trainers.torch_trainer import TorchTrainer
from rl360.types import Batch
from rl360.weight_sync.buckets import Expectation
from tests.trainers.helpers import batch_of, random_batch, sequence, tiny_folder
from tests.trainers.megatron.test_parity import LAYOUTS

Start = Callable[..., Trainer]
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 4, "tie_word_embeddings": False}


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "model", **QWEN3)


@pytest.fixture(params=["torch", "megatron tp2-pp2", "megatron cp2-dp2"])
def start(request, folder) -> Start:
    """Starts the trainer afresh; Megatron's keeps its four processes."""
    kind, _, layout = request.param.partition(" ")
    if kind == "torch":

        def make(model_dir: Path = folder, **changes) -> Trainer:
            settings = {"learning_rate": 1e-2, "num_threads": 1, "device": "cpu", "algorithm": GRPO()} | changes
            trainer = TorchTrainer(**settings, model_dir=model_dir, random_init_seed=3)
            trainer.start()
            return trainer

        return make
    ranks = request.getfixturevalue("ranks")

    def again(model_dir: Path = folder, **changes) -> Trainer:
        return ranks.again(layout=LAYOUTS[layout], model_dir=model_dir, **changes)

    return again


def published(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in trainer.publish(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_is_a_trainer(start):
    assert isinstance(start(), Trainer)


def test_versions_and_metric_names(start):
    trainer = start()
    assert trainer.version == 0
    update = trainer.step(random_batch(0))
    assert (trainer.version, update.version) == (1, 1)
    assert {
        "train/loss",
        "train/grad_norm",
        "train/entropy",
        "train/clip_fraction",
        "train/lr",
        "mismatch/kl",
        "mismatch/ratio_max",
        "mismatch/logprob_diff_mean",
        "time/train_s",
        "perf/train_tokens_per_s",
    } <= set(update.metrics)
    assert all(np.isfinite(value) for value in update.metrics.values())


def test_an_empty_batch_is_refused(start):
    trainer = start()
    with pytest.raises(ValueError, match="no sequences"):
        trainer.step(Batch((), 0, 0))
    assert trainer.version == 0


def test_a_nan_in_the_batch_never_reaches_the_weights(start, tmp_path):
    trainer = start()
    before = published(trainer, tmp_path / "before")
    bad = sequence(list(range(10, 20)), [5, 6], advantage=float("nan"))
    with pytest.raises(NonFiniteGradient, match=r"gradient norm nan, first in \S+weight;"):
        trainer.step(batch_of([bad, sequence([3, 4, 5], [6, 7], group="h")]))
    assert trainer.version == 0
    after = published(trainer, tmp_path / "after")
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert np.isfinite(trainer.step(random_batch(0)).metrics["train/grad_norm"])


def test_a_norm_that_overflows_names_the_largest_gradient(start):
    trainer = start()
    # Finite values of some 1e28, whose squares are beyond fp32.
    large = sequence(list(range(10, 20)), [5, 6], advantage=1e30)
    with pytest.raises(NonFiniteGradient, match=r"norm inf, too large for fp32: up to [\d.]+e\+\d\d in \S+weight;"):
        trainer.step(batch_of([large, sequence([3, 4, 5], [6, 7], group="h")]))
    assert trainer.version == 0
    assert np.isfinite(trainer.step(random_batch(0)).metrics["train/grad_norm"])


def test_publish_is_a_folder_that_transformers_loads_and_replaces_what_is_there(start, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = start()
    target = tmp_path / "weights" / "version-1"
    first = published(trainer, target)
    trainer.step(random_batch(0))
    assert trainer.publish(target) == target
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    loaded = model.state_dict()
    assert set(first) == set(loaded)
    assert any(not torch.equal(first[name], value) for name, value in loaded.items())
    assert [path.name for path in target.parent.iterdir()] == ["version-1"]  # nothing half-written beside it


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_is_published_is_hashed_as_engines_of_each_size_hold_it(start, dtype, tmp_path):
    """The hashes are of the trainer's own tensors: of a folder that was written well, its tensors give the same."""
    trainer = start()
    trainer.step(random_batch(0))
    found = trainer.publish_hashed(tmp_path / "w", dtype, (1, 2))
    written = {name: tensor.detach().clone() for name, tensor in published(trainer, tmp_path / "again").items()}
    kv_heads = json.loads((tmp_path / "w" / "config.json").read_text())["num_key_value_heads"]
    expected = Expectation((1, 2), kv_heads)
    for name, tensor in written.items():
        expected.add([(name, tensor if dtype is None else tensor.to(getattr(torch, dtype)))])
    assert found.hashes == expected.hashes
    assert found.slices == expected.slices
    assert len(found.slices[2]) > 0
    assert None not in found.slices[2]["model.layers.0.self_attn.qkv_proj.weight"]
    assert (found.kind, found.joined) == (expected.kind, expected.joined)
    for file in (tmp_path / "w").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_save_restore_and_step_equals_an_unbroken_run(start, tmp_path):
    batches = [random_batch(seed) for seed in range(3)]
    unbroken = start(warmup_steps=3)
    unbroken.step(batches[0])
    unbroken.save(tmp_path / "state")
    expected = [unbroken.step(batch).metrics for batch in batches[1:]]
    weights = published(unbroken, tmp_path / "unbroken")
    resumed = start(warmup_steps=3)
    resumed.step(random_batch(99))
    resumed.restore(tmp_path / "state")
    assert resumed.version == 1
    for batch, metrics in zip(batches[1:], expected, strict=True):
        found = resumed.step(batch).metrics
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/lr"):
            assert found[name] == metrics[name], name
    found_weights = published(resumed, tmp_path / "resumed")
    assert all(torch.equal(weights[name], value) for name, value in found_weights.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, "num_heads is 4; .* written for 8"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0; .* written for"),
        ({"rms_norm_eps": 1e-2}, "rms_norm_eps is 0.01; .* written for"),
    ],
)
def test_a_run_does_not_go_on_as_a_model_that_computes_otherwise(start, tmp_path, changes, said):
    """Every tensor has its name and shape, so nothing else would notice that the folder has changed."""
    numbers = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    start(tiny_folder(tmp_path / "mine", **numbers)).save(tmp_path / "state")
    other = start(tiny_folder(tmp_path / "other", **{**numbers, **changes}))
    before = published(other, tmp_path / "before")
    with pytest.raises(CheckpointError, match=rf"state/\S+: the chosen model's {said}"):
        other.restore(tmp_path / "state")
    assert all(torch.equal(before[name], value) for name, value in published(other, tmp_path / "after").items())
    longer = start(tiny_folder(tmp_path / "longer", **numbers, max_position_embeddings=4096))
    longer.restore(tmp_path / "state")  # changes no number


def test_restore_of_another_model_is_refused(start, tmp_path):
    start().save(tmp_path / "state")
    other = start(tiny_folder(tmp_path / "wide", **QWEN3, intermediate_size=96))
    with pytest.raises(CheckpointError):
        other.restore(tmp_path / "state")
