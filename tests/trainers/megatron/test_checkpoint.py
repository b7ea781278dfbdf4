"""Megatron trainer checkpoints: what comes back under any layout is what was saved, and the run goes on alike."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl360.engine.state import CheckpointStore, RunState, verify_checkpoint
from rl360.errors import CheckpointError, RL360Error
from rl360.models.export import export_hf, find_weights
from rl360.models.megatron.convert import to_megatron
from rl360.models.megatron.torch_dist import Reader
from tests.models.megatron.processes import run_ranks
from tests.models.megatron.ranks import load_release
from tests.trainers.helpers import random_batch, tiny_folder
from tests.trainers.megatron.group import Ranks

SIZE = 2
LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "pp2-vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
}
QUICK = {("dp2", "pp2"), ("tp2", "dp2"), ("pp2", "tp2"), ("pp2", "pp2-vpp2"), ("dp2", "cp2")}
PAIRS = [
    pytest.param(*pair, id="-to-".join(pair), marks=() if pair in QUICK else pytest.mark.slow)
    for pair in product(("dp2", "tp2", "pp2"), LAYOUTS)
]
SETTINGS = {"learning_rate": 1e-3, "warmup_steps": 3, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tied") / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    changes = {"model_type": "qwen3", "tie_word_embeddings": False, "num_hidden_layers": 4, "vocab_size": 131}
    return tiny_folder(tmp_path_factory.mktemp("untied") / "model", **changes)


@pytest.fixture(scope="module")
def ranks(tied):
    group = Ranks(SIZE, tied)
    yield group
    group.close()


def iteration(folder: Path) -> Path:
    (found,) = folder.glob("iter_*")
    return found


def assert_same_tensors(folder: Path, other: Path) -> None:
    left, right = Reader(iteration(folder)), Reader(iteration(other))
    assert left.names()
    assert set(left.names()) == set(right.names())
    for name in left.names():
        shape = left.shape(name)
        assert shape == right.shape(name), name
        a, b = (reader.read(name, (0,) * len(shape), shape) for reader in (left, right))
        assert torch.equal(a, b), name
    assert left.common()["rl360"] == right.common()["rl360"]


def assert_equal_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ranks, tied, tmp_path, layout):
    trainer = ranks.again(layout=LAYOUTS[layout], model_dir=tied, random_init_seed=3, **SETTINGS)
    batches = [random_batch(seed) for seed in (1, 2, 3, 4)]
    for batch in batches[:2]:
        trainer.step(batch)
    trainer.save(tmp_path / "saved")
    wanted = [trainer.step(batch).metrics for batch in batches[2:]]
    weights = ranks.weights()

    trainer = ranks.again(layout=LAYOUTS[layout], model_dir=tied, random_init_seed=99, **SETTINGS)
    trainer.step(random_batch(7))  # moments and a step of another run are in the way
    trainer.restore(tmp_path / "saved")
    assert trainer.version == 2
    found = [trainer.step(batch).metrics for batch in batches[2:]]
    assert_equal_weights(ranks.weights(), weights)
    for one, other in zip(found, wanted, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr", "train/entropy"):
            assert one[name] == other[name], name


@pytest.fixture(scope="module", params=["tied", "untied"])
def saved(request, ranks, tied, untied, tmp_path_factory):
    """(model folder, {layout: checkpoint of the same run after two steps}, metrics of the third step of each)."""
    folder = {"tied": tied, "untied": untied}[request.param]
    places, thirds = {}, {}
    for name in ("dp2", "tp2", "pp2"):
        trainer = ranks.again(layout=LAYOUTS[name], model_dir=folder, random_init_seed=3, **SETTINGS)
        for seed in (1, 2):
            trainer.step(random_batch(seed))
        places[name] = tmp_path_factory.mktemp(name) / "saved"
        trainer.save(places[name])
        thirds[name] = trainer.step(random_batch(3)).metrics
    return folder, places, thirds


@pytest.mark.parametrize(("written", "read"), PAIRS)
def test_any_layout_restores_what_any_other_saved(ranks, saved, tmp_path, written, read):
    """Weights, masters, moments and step: saved again, they are the same to the last bit."""
    folder, places, thirds = saved
    trainer = ranks.again(layout=LAYOUTS[read], model_dir=folder, random_init_seed=99, **SETTINGS)
    trainer.restore(places[written])
    trainer.save(tmp_path / "again")
    assert_same_tensors(places[written], tmp_path / "again")
    metrics = trainer.step(random_batch(3)).metrics
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert metrics[name] == pytest.approx(thirds[written][name], rel=1e-4, abs=1e-6), name
    assert metrics["train/lr"] == SETTINGS["learning_rate"]  # the third of three steps of warm-up


def test_before_the_first_step(ranks, tied, tmp_path):
    trainer = ranks.again(layout=LAYOUTS["tp2"], model_dir=tied, random_init_seed=3, **SETTINGS)
    weights = ranks.weights()
    trainer.save(tmp_path / "saved")
    wanted = trainer.step(random_batch(1)).metrics["train/grad_norm"]
    trainer.restore(tmp_path / "saved")  # in the same trainer: its moments are forgotten
    assert trainer.version == 0
    assert_equal_weights(ranks.weights(), weights)
    metrics = trainer.step(random_batch(1)).metrics
    assert (metrics["train/grad_norm"], metrics["train/lr"]) == (wanted, SETTINGS["learning_rate"] / 3)


def test_names_and_shapes_are_megatrons(ranks, untied, tmp_path):
    trainer = ranks.again(layout=LAYOUTS["tp2"], model_dir=untied, random_init_seed=3)
    trainer.step(random_batch(1))
    trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"
    folder = tmp_path / "saved" / "iter_0000001"
    assert {path.name for path in folder.iterdir()} == {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"}
    reader = Reader(folder)
    shapes = {name: reader.shape(name) for name in reader.names()}
    assert shapes["decoder.layers.mlp.linear_fc1.weight"] == (4, 160, 48)
    assert shapes["embedding.word_embeddings.weight"] == (256, 48)  # 131 rows; each of 2 ranks has 128
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        for name in ("decoder.layers.mlp.linear_fc1.weight", "output_layer.weight", "decoder.final_layernorm.weight"):
            assert shapes[f"optimizer.state.{kind}.{name}"] == shapes[name]
    common = reader.common()
    assert common["iteration"] == 1
    assert {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]} == {1}


def test_training_goes_on_while_the_files_are_written(ranks, tied, tmp_path):
    trainer = ranks.again(layout=LAYOUTS["dp2"], model_dir=tied, random_init_seed=3, **SETTINGS)
    trainer.step(random_batch(1))
    trainer.save(tmp_path / "before")
    pending = trainer.begin_save(tmp_path / "meanwhile")
    trainer.step(random_batch(2))  # changes every weight and moment in place
    trainer.step(random_batch(3))
    pending.wait()
    pending.wait()  # a second time is nothing
    assert_same_tensors(tmp_path / "before", tmp_path / "meanwhile")
    trainer._async_checkpoint = False
    try:
        assert trainer.begin_save(tmp_path / "at once") is None
    finally:
        trainer._async_checkpoint = True
    assert Reader(iteration(tmp_path / "at once")).common()["rl360"]["version"] == 3


def test_an_exported_checkpoint_is_what_the_trainer_publishes(ranks, untied, tmp_path, monkeypatch):
    trainer = ranks.again(layout=LAYOUTS["pp2"], model_dir=untied, random_init_seed=3, **SETTINGS)
    trainer.step(random_batch(1))
    monkeypatch.setattr(trainer, "_model_dir", untied)  # `again` tells it to the ranks alone
    trainer.save(tmp_path / "saved")
    trainer.publish(tmp_path / "published")
    export_hf(tmp_path / "saved", tmp_path / "exported")

    def tensors(folder: Path):
        return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}

    assert_equal_weights(tensors(tmp_path / "exported"), tensors(tmp_path / "published"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("exported", "published")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 96}, r"iter_0000000/.metadata: tensor decoder.layers.mlp.linear_fc1.weight has shape"),
        ({"num_hidden_layers": 6}, r"\.metadata: tensor decoder.layers.\S+ has shape \[4, .* the model's is \[6, "),
        ({"model_type": "qwen3"}, r"tensor decoder.layers.self_attention.q_layernorm.weight is not in this checkpoint"),
        ({"tie_word_embeddings": False}, r"tensor output_layer.weight is not in this checkpoint"),
    ],
)
def test_another_model_is_named_and_nothing_changes(ranks, tied, tmp_path, changes, message):
    ranks.again(model_dir=tied, random_init_seed=3).save(tmp_path / "saved")
    other = tiny_folder(tmp_path / "other", **{"num_hidden_layers": 4, **changes})
    trainer = ranks.again(model_dir=other, random_init_seed=4)
    weights = ranks.weights()
    with pytest.raises(CheckpointError, match=message):
        trainer.restore(tmp_path / "saved")
    assert_equal_weights(ranks.weights(), weights)  # of ranks that go on


def test_a_checkpoint_with_more_than_the_model_is_refused(ranks, tied, untied, tmp_path):
    ranks.again(model_dir=untied, random_init_seed=3).save(tmp_path / "saved")
    trainer = ranks.again(model_dir=tiny_folder(tmp_path / "llama", num_hidden_layers=4, vocab_size=131))
    with pytest.raises(CheckpointError, match=r"k_layernorm.weight is not in a llama of this config"):
        trainer.restore(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"k_layernorm.weight is not in a llama of this config"):
        export_hf(tmp_path / "saved", tmp_path / "out", model=tmp_path / "llama")
    assert not (tmp_path / "out").exists()


def test_weights_without_an_optimizer_are_refused(ranks, tied, tmp_path):
    """A run does not go on with converted weights and fresh moments as if nothing had happened."""
    trainer = ranks.again(model_dir=tied, random_init_seed=3)
    trainer.publish(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=r"release: no training checkpoint .* named by model.path"):
        trainer.restore(tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=r"nothing: no such folder; expected a Megatron checkpoint"):
        trainer.restore(tmp_path / "nothing")


def test_bf16_weights_come_back_with_their_fp32_masters(ranks, tied, tmp_path):
    bf16 = {"dtype": torch.bfloat16, "model_dir": tied, **SETTINGS}
    trainer = ranks.again(layout=LAYOUTS["dp2"], random_init_seed=3, **bf16)
    for seed in (1, 2):
        trainer.step(random_batch(seed))
    trainer.save(tmp_path / "saved")
    trainer.step(random_batch(3))
    weights = ranks.weights()
    reader = Reader(iteration(tmp_path / "saved"))
    name = "decoder.layers.mlp.linear_fc2.weight"
    shape = reader.shape(name)
    low, master = (reader.read(key, (0, 0, 0), shape) for key in (name, f"optimizer.state.param.{name}"))
    assert (low.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(low, master.bfloat16())
    assert not torch.equal(low.float(), master), "the master has what bf16 cannot hold"
    trainer = ranks.again(layout=LAYOUTS["dp2"], random_init_seed=99, **bf16)
    trainer.restore(tmp_path / "saved")
    trainer.step(random_batch(3))
    assert_equal_weights(ranks.weights(), weights)
    trainer = ranks.again(layout=LAYOUTS["tp2"], random_init_seed=99, **bf16)
    trainer.restore(tmp_path / "saved")
    trainer.save(tmp_path / "again")
    assert_same_tensors(tmp_path / "saved", tmp_path / "again")


@pytest.mark.slow
def test_four_ranks(untied, tmp_path):
    """Three axes at once, saved by four ranks and restored by as many in another order, and by one."""
    layouts = {
        "tp2-pp2": {"tensor": 2, "pipeline": 2},
        "dp4": {},
        "tp2-cp2": {"tensor": 2, "context": 2},
        "pp2-vpp2-dp2": {"pipeline": 2, "virtual_pipeline": 2},
    }
    ranks = Ranks(4, untied)
    try:
        trainer = ranks.again(layout=layouts["tp2-pp2"], random_init_seed=3, **SETTINGS)
        trainer.step(random_batch(1))
        trainer.save(tmp_path / "saved")
        before = "saved"
        for name in ("dp4", "tp2-cp2", "pp2-vpp2-dp2", "tp2-pp2"):
            trainer = ranks.again(layout=layouts[name], random_init_seed=99, **SETTINGS)
            trainer.restore(tmp_path / before)
            trainer.save(tmp_path / name)
            assert_same_tensors(tmp_path / "saved", tmp_path / name)
            before = name
    finally:
        ranks.close()
    alone = Ranks(1, untied)
    try:
        alone.trainer.restore(tmp_path / before)
        alone.trainer.save(tmp_path / "alone")
        assert_same_tensors(tmp_path / "saved", tmp_path / "alone")
    finally:
        alone.close()


@pytest.mark.slow
@pytest.mark.parametrize(("written", "tensor", "pipeline"), [("tp2", 1, 2), ("pp2", 2, 1)])
def test_megatrons_own_reader_loads_the_weights(ranks, untied, tmp_path, written, tensor, pipeline):
    trainer = ranks.again(layout=LAYOUTS[written], model_dir=untied, random_init_seed=3, **SETTINGS)
    trainer.step(random_batch(1))
    trainer.save(tmp_path / "saved")
    trainer.publish(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_bytes((untied / "config.json").read_bytes())
    folder = str(iteration(tmp_path / "saved"))
    run_ranks(load_release, 2, tmp_path, folder, str(tmp_path / "hf"), tensor, pipeline)


def test_a_run_saves_in_the_background_and_a_crash_leaves_the_checkpoint_before(ranks, tied, tmp_path):
    """The last test: its ranks are killed while they write."""
    trainer = ranks.again(layout=LAYOUTS["dp2"], model_dir=tied, random_init_seed=3, **SETTINGS)
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    trainer.step(random_batch(1))
    store.save(RunState(1, 1), trainer.begin_save)
    trainer.step(random_batch(2))
    store.save(RunState(2, 2), trainer.begin_save)
    trainer.step(random_batch(3))
    store.wait()
    assert [one.state.iteration for one in store.completed()] == [1, 2]
    latest = store.latest()
    assert latest is not None
    verify_checkpoint(latest)
    assert Reader(iteration(latest.trainer_folder)).common()["rl360"]["num_steps"] == 2
    assert find_weights(tmp_path).weights == latest.trainer_folder

    def killed(folder: Path):
        pending = trainer.begin_save(folder)
        with pytest.raises(RL360Error):
            trainer._call("die", [("kill",)], 30.0)
        return pending

    store.save(RunState(3, 3), killed)
    with pytest.raises(CheckpointError, match="ended before their checkpoint was complete"):
        store.wait()
    again = CheckpointStore(tmp_path)
    assert again.latest() == latest
    assert not again.damaged()
