"""HF folders out of runs and checkpoints of trainer=torch; those of trainer=megatron are exported in its own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl360.algorithms.grpo import GRPO
from rl360.engine.state import CheckpointStore, RunState
from rl360.errors import CheckpointError, ConfigError
from rl360.models.export import export_hf, find_weights
from rl360.models.hf_folder import LazyTensor, Ranks, new_folder, plan_shards, write_safetensors, write_weights
from rl360.models.tiny import write_tiny
from rl360.trainers.torch_trainer import TorchTrainer
from tests.trainers.helpers import random_batch


def make_run(folder: Path, family: str = "qwen3") -> tuple[Path, TorchTrainer]:
    """A run folder with checkpoints of iterations 1 (the best) and 2, and the trainer at iteration 2."""
    model = write_tiny(folder / "models" / "policy", family)
    trainer = TorchTrainer(1e-2, device="cpu", num_threads=1, model_dir=model, algorithm=GRPO())
    trainer.start()
    store = CheckpointStore(folder / "run", keep_last=2)
    for iteration in (1, 2):
        trainer.step(random_batch(iteration))
        store.save(RunState(iteration, iteration), trainer.save, best=iteration == 1)
        trainer.publish(folder / f"published-{iteration}")
    resolved = {"model": {"name": "policy", "path": None}, "paths": {"models": str(folder / "models")}}
    (folder / "run" / "resolved.yaml").write_text(json.dumps(resolved))  # JSON is YAML
    return folder / "run", trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    base = tmp_path_factory.mktemp("export")
    return make_run(base)[0]


def assert_same_folder(folder: Path, other: Path) -> None:
    left, right = ({k: v for f in p.glob("*.safetensors") for k, v in load_file(f).items()} for p in (folder, other))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
    mine = {path.name for path in folder.iterdir() if not path.name.startswith("model")}
    assert mine == {path.name for path in other.iterdir() if not path.name.startswith("model")}
    for name in mine:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize(
    ("inside", "best", "published"),
    [
        ("", False, 2),
        ("", True, 1),
        ("checkpoints/iteration-000001", False, 1),
        ("checkpoints/iteration-000002/trainer", False, 2),
    ],
)
def test_a_run_a_checkpoint_and_a_trainers_folder(run, tmp_path, inside, best, published):
    used = export_hf(run / inside, tmp_path / "out", best=best)
    assert used.name == "trainer"
    assert_same_folder(tmp_path / "out", run.parent / f"published-{published}")


def test_another_dtype_and_shards(run, tmp_path):
    progress = []
    export_hf(
        run,
        tmp_path / "out",
        dtype=torch.bfloat16,
        max_shard_bytes=20_000,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert progress[-1][0] == progress[-1][1]
    whole = load_file(run.parent / "published-2" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(value.numel() * 2 for value in whole.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], whole[name].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, whole["lm_head.weight"].bfloat16())


def test_what_cannot_be_exported(run, tmp_path):
    cases = [
        (tmp_path / "nowhere", CheckpointError, "no such folder"),
        (tmp_path, CheckpointError, "no weights in it"),
        (run / "checkpoints" / "iteration-000002", ConfigError, "out: is there already"),
    ]
    with pytest.raises(ConfigError, match="iteration-000002: no run, so it has no best checkpoint"):
        export_hf(run / "checkpoints" / "iteration-000002", tmp_path / "out", best=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    for path, kind, message in cases:
        with pytest.raises(kind, match=message):
            export_hf(path, tmp_path / "out")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="empty/checkpoints: no complete best checkpoint"):
        export_hf(tmp_path / "empty", tmp_path / "new", best=True)


def test_a_damaged_checkpoint_and_a_model_that_is_another(tmp_path):
    run, _ = make_run(tmp_path)
    other = write_tiny(tmp_path / "other", "qwen3", ffn=112)
    with pytest.raises(CheckpointError, match=r"trainer.pt: tensor model.layers.0.mlp.gate_proj.weight has shape"):
        export_hf(run, tmp_path / "out", model=other)
    (run / "resolved.yaml").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json; name the model's HF folder with --model"):
        export_hf(run, tmp_path / "out")
    export_hf(run, tmp_path / "out", model=tmp_path / "models" / "policy")
    newest = run / "checkpoints" / "iteration-000002"
    (newest / "trainer" / "trainer.pt").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="iteration-000002: incomplete or damaged"):
        export_hf(newest, tmp_path / "again", model=tmp_path / "models" / "policy")
    assert find_weights(run, tmp_path / "models" / "policy").weights.parent.name == "iteration-000001"


def test_another_model_whose_shapes_fit_is_refused(tmp_path):
    """q, k and v would be cut into heads at other rows, and nobody would notice but the reader of the answers."""
    run, _ = make_run(tmp_path, "llama")
    other = write_tiny(tmp_path / "other", "llama", heads=3, kv_heads=1, head_dim=16)
    with pytest.raises(CheckpointError, match=r"other/config.json: num_heads is 3; these weights were written for 6"):
        export_hf(run, tmp_path / "out", model=other)
    assert not (tmp_path / "out").exists()
    longer = write_tiny(tmp_path / "longer", "llama", max_positions=4096)
    export_hf(run, tmp_path / "out", model=longer)  # moves no weight


# ---- the folder itself


def lazy(name: str, value: torch.Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(value.shape), value.dtype, lambda: value)


def test_a_file_is_what_safetensors_reads(tmp_path):
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
        "b.weight": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "c": torch.zeros(0, 4, dtype=torch.float16),
        "d": torch.tensor([1.0], dtype=torch.float64),
    }
    seen: list[int] = []
    write_safetensors(tmp_path / "x.safetensors", [lazy(n, v) for n, v in tensors.items()], seen.append)
    assert seen == [24, 4, 0, 8]
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_shards_are_cut_where_the_next_tensor_does_not_fit():
    tensors = [lazy(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))]
    shards = [[tensor.name for tensor in shard] for shard in plan_shards(tensors, 16)]  # bytes: four fp32
    assert shards == [["a", "b"], ["c"], ["d", "e"]]


def test_a_failure_in_the_middle_leaves_no_folder(tmp_path):
    def fails() -> torch.Tensor:
        raise OSError(28, "No space left on device")

    tensors = [lazy("a", torch.zeros(3)), LazyTensor("b", (3,), torch.float32, fails)]
    with pytest.raises(OSError, match="No space"), new_folder(tmp_path / "out", Ranks()) as staging:
        write_weights(staging, tensors, Ranks())
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize("inside", ["", "checkpoints/iteration-000002", "checkpoints/iteration-000002/trainer"])
def test_a_checkpoint_whose_bytes_have_changed_is_refused(tmp_path, inside):
    """Its files have the sizes of the manifest, and torch reads one changed bit of a weight without a word."""
    run, _ = make_run(tmp_path)
    file = run / "checkpoints" / "iteration-000002" / "trainer" / "trainer.pt"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"trainer\.pt: its bytes are not those that were saved"):
        export_hf(run / inside, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_hf(run / "checkpoints" / "iteration-000001", tmp_path / "out")


def test_a_head_that_a_tied_config_would_drop_is_refused(run, tmp_path):
    source = run.parent / "models" / "policy"
    tied = tmp_path / "tied"
    tied.mkdir()
    raw = json.loads((source / "config.json").read_text())
    assert raw["tie_word_embeddings"] is False
    (tied / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"trainer\.pt: tensor lm_head\.weight differs from model\.embed_tokens"):
        export_hf(run, tmp_path / "out", model=tied)
    assert not (tmp_path / "out").exists()
