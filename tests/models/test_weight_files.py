"""Weight files by their headers: what is cut, mislabelled or without an index is named before a value is read."""

from __future__ import annotations

import json

import pytest

from rl360.errors import CheckpointError
from rl360.models.fetch import folder_problems
from rl360.models.inspection import checkpoint_differences
from rl360.models.loading import load_decoder
from rl360.models.tiny import write_tiny

NORM = "model.norm.weight"


def write_header(folder, text):
    """Another header for the folder's only weight file; the tensors' bytes stay."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def header_of(folder):
    data = (folder / "model.safetensors").read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def refused(folder):
    """What `check` says, which is what loading says."""
    (problem,) = checkpoint_differences(folder)
    assert str(folder / "model.safetensors") in problem
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder)
    assert str(caught.value) == problem
    return problem


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_offsets": None}, "unreadable safetensors file"),
        ({"data_offsets": [0]}, "unreadable safetensors file"),
        ({"dtype": "BF16"}, "tensor model.norm.weight: 192 bytes for BF16 of shape [48]"),
        ({"shape": [-48]}, "tensor model.norm.weight: 192 bytes for F32 of shape [-48]"),
        # As many bytes as other numbers have: taken for what they say, they would be other weights.
        ({"dtype": "I32"}, "tensor model.norm.weight has dtype I32; expected one of F32, F64, F16, BF16"),
        ({"data_offsets": [4, 196]}, "the one before ends at"),
    ],
)
def test_a_tensor_that_is_not_what_the_header_says(tmp_path, changes, said):
    folder = write_tiny(tmp_path / "m", "llama")
    entries = header_of(folder)
    entries[NORM] |= changes
    write_header(folder, json.dumps(entries).encode())
    assert said in refused(folder)


@pytest.mark.parametrize("text", [b"[]", b"5", b'{"a": null}', b'{"a": {"dtype": "F32", "shape": [1]}}', b"\xff", b""])
def test_a_header_that_is_none(tmp_path, text):
    folder = write_tiny(tmp_path / "m", "llama")
    write_header(folder, text)
    assert "unreadable safetensors file" in refused(folder)
    assert "unreadable safetensors file" in folder_problems(folder)[0]


@pytest.mark.parametrize("left", [0, 7, 8, 5000, -1])
def test_a_file_that_was_cut(tmp_path, left):
    folder = write_tiny(tmp_path / "m", "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    assert "unreadable safetensors file" in refused(folder)


@pytest.mark.parametrize(
    "text", ["null", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": {}}}']
)
def test_an_index_that_is_none(tmp_path, text):
    folder = write_tiny(tmp_path / "m", "llama")
    (folder / "model.safetensors.index.json").write_text(text)
    (problem,) = checkpoint_differences(folder)
    assert "model.safetensors.index.json: unreadable index" in problem
    assert any("model.safetensors.index.json" in problem for problem in folder_problems(folder))


def test_shards_that_no_index_names(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    said = "model-00001-of-00002.safetensors is there, and no model.safetensors.index.json"
    assert said in checkpoint_differences(folder)[0]
    assert said in folder_problems(folder)[0]
