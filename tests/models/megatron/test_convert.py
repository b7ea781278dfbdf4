"""HF to Megatron's format and back, bit for bit, and into real Megatron models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl360 import cli
from rl360.engine.state import CheckpointStore, RunState
from rl360.errors import CheckpointError, ConfigError
from rl360.models.megatron import convert, torch_dist
from rl360.models.megatron.convert import to_hf, to_megatron
from rl360.models.megatron.torch_dist import Reader
from rl360.models.weight_files import expected_tensors
from tests.models.megatron import ranks
from tests.models.megatron.processes import run_ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": False},
    "k2_horizon": {
        "model_type": "k2_horizon",
        "layernorm_num_groups": 2,
        "tie_word_embeddings": False,
        "rope_theta": 1e7,
    },
}


@pytest.fixture
def hf(tmp_path: Path) -> Callable[..., Path]:
    """An HF folder with random weights, whatever transformers knows of the family."""

    def make(family: str = "llama_tied", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        from rl360.models.decoder import DecoderConfig

        raw = {
            "vocab_size": 131,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "torch_dtype": str(dtype).removeprefix("torch."),
            **FAMILIES[family],
            **changes,
        }
        folder = tmp_path / "hf"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        (folder / "tokenizer.json").write_text("{}")
        generator = torch.Generator().manual_seed(3)
        shapes = expected_tensors(DecoderConfig.from_hf(raw))
        tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(folder: Path, other: Path) -> None:
    left, right = tensors_of(folder), tensors_of(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_in_one_process_is_bit_equal(tmp_path, hf, family, dtype):
    source = hf(family, dtype)
    seen: list[tuple[int, int]] = []
    to_megatron(source, tmp_path / "megatron", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    release = tmp_path / "megatron" / "release"
    assert {path.name for path in release.iterdir()} == {".metadata", "metadata.json", "__0_0.distcp"}
    assert json.loads((release / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_same(source, tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_layers_are_stacked_and_named_as_megatron_names_them(tmp_path, hf):
    to_megatron(hf("qwen3"), tmp_path / "megatron")
    reader = Reader(tmp_path / "megatron" / "release")
    assert {key: reader.shape(key) for key in reader.names()} == {
        "embedding.word_embeddings.weight": (256, 16),
        "decoder.layers.input_layernorm.weight": (2, 16),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 16),
        "decoder.layers.self_attention.linear_qkv.weight": (2, (4 + 2 * 2) * 12, 16),
        "decoder.layers.self_attention.q_layernorm.weight": (2, 12),
        "decoder.layers.self_attention.k_layernorm.weight": (2, 12),
        "decoder.layers.self_attention.linear_proj.weight": (2, 16, 4 * 12),
        "decoder.layers.pre_mlp_layernorm.weight": (2, 16),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 16),
        "decoder.layers.mlp.linear_fc1.weight": (2, 48, 16),
        "decoder.layers.mlp.linear_fc2.weight": (2, 16, 24),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (256, 16),
    }
    assert reader.common()["checkpoint_version"] == 3.0
    padding = reader.read("output_layer.weight", (131, 0), (125, 16))
    assert not padding.any()


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [("llama_tied", 1, 2), ("qwen3", 2, 1), ("k2_horizon", 2, 2), ("llama_tied", 2, 2), ("qwen3", 1, 1)],
)
def test_a_real_megatron_model_loads_it(tmp_path, hf, family, tensor, pipeline):
    source = hf(family)
    to_megatron(source, tmp_path / "megatron")
    release = str(tmp_path / "megatron" / "release")
    run_ranks(ranks.load_release, tensor * pipeline, tmp_path, release, str(source), tensor, pipeline)


@pytest.mark.parametrize("family", ["qwen3", "llama_tied"])
def test_megatrons_stock_layers_load_it(tmp_path, hf, family):
    source = hf(family)
    to_megatron(source, tmp_path / "megatron")
    run_ranks(ranks.load_stock, 1, tmp_path, str(tmp_path / "megatron" / "release"), str(source))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_work(tmp_path, hf, size):
    source = hf("qwen3", torch.bfloat16)
    run_ranks(ranks.convert_together, size, tmp_path, str(source), str(tmp_path))
    release = tmp_path / "megatron" / "release"
    sizes = [path.stat().st_size for path in sorted(release.glob("*.distcp"))]
    assert len(sizes) == size
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert_same(source, tmp_path / "back")
    to_hf(tmp_path / "megatron", tmp_path / "alone")  # what many wrote, one reads
    assert_same(source, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_command_under_torchrun(tmp_path, hf, world):
    source = hf("llama_tied")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--no-python"]
    rl360 = [sys.executable, "-c", "import sys; from rl360.cli import main; sys.exit(main())", "model", "convert"]
    there = [*command, *rl360, str(source), "--to", "megatron", "--out", str(tmp_path / "megatron")]
    if world > 1:
        command.insert(3, "--master-port=0")
    done = subprocess.run(there, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "megatron")
    back = [*rl360, str(tmp_path / "megatron"), "--to", "hf", "--out", str(tmp_path / "back")]
    done = subprocess.run(back, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(source, tmp_path / "back")


# ---- what is refused


def test_what_does_not_fit_is_named_with_its_file(tmp_path, hf):
    source = hf("qwen3")
    to_megatron(source, tmp_path / "megatron")
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "other").mkdir()
    for changes, message in (
        ({"intermediate_size": 20}, r"\.metadata: tensor decoder.layers.mlp.linear_fc1.weight has shape \[2, 48, 16\]"),
        ({"num_hidden_layers": 3}, r"tensor decoder.layers.input_layernorm.weight has shape \[2, 16\], .*\[3, 16\]"),
        ({"vocab_size": 300}, r"tensor embedding.word_embeddings.weight has shape \[256, 16\], .*\[300, 16\]"),
        ({"hidden_size": 8}, r"tensor embedding.word_embeddings.weight"),
    ):
        (tmp_path / "other" / "config.json").write_text(json.dumps({**raw, **changes}))
        with pytest.raises(CheckpointError, match=message):
            to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({**raw, "intermediate_size": 20}))
    save_file(tensors_of(source), tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor .*down_proj.weight has shape \[16, 24\]"):
        to_megatron(tmp_path / "other", tmp_path / "new")
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, r"other/config.json: vocab_size is 100; .* written for 131 \(.*/hf/config.json\)"),
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}, "num_heads is 2; .* for 4"),
    ],
)
def test_another_model_whose_shapes_fit_is_refused(tmp_path, hf, changes, message):
    """Rows of the vocabulary would be cut off as padding, or q, k and v be told apart at the wrong rows."""
    source = hf("llama_tied")
    to_megatron(source, tmp_path / "megatron")
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(CheckpointError, match=message):
        to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "other")
    assert not (tmp_path / "back").exists()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 9}))
    to_hf(tmp_path / "megatron", tmp_path / "back", tmp_path / "other")  # moves no weight
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 9


def test_one_matrix_of_two_dtypes_is_refused(tmp_path, hf):
    source = hf("llama_tied")
    tensors = tensors_of(source)
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].bfloat16()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.k_proj.weight.*bfloat16"):
        to_megatron(source, tmp_path / "megatron")


def test_a_tied_models_own_head_is_not_dropped_on_the_way(tmp_path, hf):
    source = hf("llama_tied")
    tensors = tensors_of(source)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors")
    to_megatron(source, tmp_path / "copy")  # a copy of the embedding, as some checkpoints hold it
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor lm_head.weight differs from"):
        to_megatron(source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_a_megatron_checkpoint_with_a_head_and_a_tied_config(tmp_path, hf):
    to_megatron(hf("qwen3"), tmp_path / "untied")
    config = tmp_path / "untied" / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"tensor output_layer.weight is not in a qwen3 of this config"):
        to_hf(tmp_path / "untied", tmp_path / "back")


def test_a_folder_in_the_way_and_a_folder_that_is_no_checkpoint(tmp_path, hf):
    source = hf()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="full: is there already"):
        to_megatron(source, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    to_megatron(source, tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"hf: no Megatron checkpoint; expected latest_checkpointed_iteration"):
        to_hf(source, tmp_path / "back")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(CheckpointError, match=r"says 'newest'; expected release or the number"):
        to_hf(tmp_path / "empty", tmp_path / "back")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"expected release or the number"):
        to_hf(tmp_path / "empty", tmp_path / "back")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(CheckpointError, match=r"iter_0000012/.metadata: not found"):
        to_hf(tmp_path / "empty", tmp_path / "back", source)


def test_a_damaged_file_is_named(tmp_path, hf):
    source = hf()
    to_megatron(source, tmp_path / "megatron")
    file = tmp_path / "megatron" / "release" / "__0_0.distcp"
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError, match=r"release: a \*.distcp file is unreadable"):
        to_hf(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob(".*unfinished"))
    (tmp_path / "megatron" / "release" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"\.metadata: unreadable"):
        to_hf(tmp_path / "megatron", tmp_path / "back")


@pytest.mark.parametrize("inside", ["trainer", "trainer/iter_0000001", "trainer/iter_0000001/../iter_0000001"])
def test_a_runs_checkpoint_whose_bytes_have_changed_is_refused_by_whichever_way_in(tmp_path, hf, capsys, inside):
    """torch reads one changed bit of a weight without a word."""

    def write(folder: Path) -> None:
        to_megatron(source, folder)
        (folder / "release").rename(folder / "iter_0000001")
        (folder / "latest_checkpointed_iteration.txt").write_text("1")

    source, store = hf(), CheckpointStore(tmp_path / "run")
    path = store.save(RunState(1, 1), write).folder / inside
    commands = [
        ["model", command, str(path), *more, "--out", str(tmp_path / command)]
        for command, more in (("export", []), ("convert", ["--to", "hf"]))
    ]
    assert [cli.main(words) for words in commands] == [0, 0]
    file = store.latest().trainer_folder / "iter_0000001" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    for words in commands:
        assert cli.main([*words[:-1], str(tmp_path / "again")]) == 1
        assert f"{file}: its bytes are not those that were saved" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", [b"strided", b"relative_path", b"sizes", b"offsets", b"storage_data", b"_StorageInfo"])
def test_metadata_with_one_changed_letter_is_named(tmp_path, hf, name):
    """It is a pickle, so a changed bit is another name, an object without its fields, or text that is none."""
    source = hf()
    to_megatron(source, tmp_path / "megatron")
    file = tmp_path / "megatron" / "release" / ".metadata"
    raw = file.read_bytes()
    for letter in (b"q", b"\xf3"):
        file.write_bytes(raw.replace(name, letter + name[1:]))
        with pytest.raises(CheckpointError, match=r"release(/\.metadata: |: .*\.metadata |: )"):
            to_hf(tmp_path / "megatron", tmp_path / "back")
        assert not (tmp_path / "back").exists()


def test_a_failure_leaves_nothing_and_the_next_call_cleans_up(tmp_path, hf, monkeypatch):
    source = hf()
    staging = tmp_path / ".megatron.unfinished"
    staging.mkdir()
    (staging / "left by a killed run").write_text("")

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch_dist, "write", full)
        with pytest.raises(OSError, match="No space left"):
            to_megatron(source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    assert not staging.exists()
    to_megatron(source, tmp_path / "megatron")
    assert sorted(path.name for path in (tmp_path / "megatron").iterdir()) == [
        "hf",
        "latest_checkpointed_iteration.txt",
        "release",
    ]


def test_one_at_a_time(tmp_path, hf, monkeypatch):
    source = hf()
    inside, leave = threading.Event(), threading.Event()
    real = torch_dist.write

    def slow(*arguments: Any, **more: Any) -> None:
        inside.set()
        assert leave.wait(30)
        real(*arguments, **more)

    monkeypatch.setattr(convert.torch_dist, "write", slow)
    first = threading.Thread(target=to_megatron, args=(source, tmp_path / "megatron"))
    first.start()
    assert inside.wait(30)
    with pytest.raises(ConfigError, match="another process is making it"):
        to_megatron(source, tmp_path / "megatron")
    leave.set()
    first.join(30)
    assert Reader(tmp_path / "megatron" / "release").shape("decoder.final_layernorm.weight") == (16,)


MEASURE = """
import sys, threading, time
from pathlib import Path
from rl360.models.megatron.convert import to_hf, to_megatron

def anonymous_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024

import torch
torch.ones(4).bfloat16().clone()
before, peak, done = anonymous_mib(), [0.0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous_mib()); time.sleep(0.002)
watcher = threading.Thread(target=watch); watcher.start()
to_megatron(sys.argv[1], sys.argv[2]); to_hf(sys.argv[2], sys.argv[3])
done.set(); watcher.join()
print(peak[0] - before)
"""


@pytest.mark.slow
def test_a_conversion_holds_a_few_matrices_and_not_the_model(tmp_path, hf):
    """400 MB of weights, the largest matrix 33 MB: memory of the process itself (file pages apart) stays small."""
    source = hf(
        "k2_horizon",
        num_hidden_layers=12,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=4096,
        torch_dtype="bfloat16",
        dtype=torch.bfloat16,
    )
    total_mib = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 2**20
    assert total_mib > 300
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "megatron"), str(tmp_path / "back")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert float(done.stdout) < 0.4 * total_mib, done.stdout
    assert_same(source, tmp_path / "back")
