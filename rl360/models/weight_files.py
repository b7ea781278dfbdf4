"""The tensors of a Hugging Face folder, by name and by slice, checked against the chosen architecture first.

In: a folder with *.safetensors (one file, or shards with an index) and a `DecoderConfig`. Out: which file holds which
tensor, and slices read from it without loading the rest. Left to others: what the slices are for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rl360.models.decoder import DecoderConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 8192  # of embedding and head at once
ANOTHER_HEAD = (
    f"tensor {HEAD} differs from {EMBEDDING}, and config.json says tie_word_embeddings: one of them would be dropped; "
    "expected equal values; set tie_word_embeddings to false if the model has a head of its own, else leave it out"
)
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
# The one tensor that older checkpoints hold although it is computed from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this architecture holds, in the order of the layers."""
    hidden, width = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        found[f"{prefix}input_layernorm.weight"] = (hidden,)
        found[f"{prefix}self_attn.q_proj.weight"] = (query, hidden)
        found[f"{prefix}self_attn.k_proj.weight"] = (key, hidden)
        found[f"{prefix}self_attn.v_proj.weight"] = (key, hidden)
        found[f"{prefix}self_attn.o_proj.weight"] = (hidden, query)
        if config.qk_norm:
            found[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            found[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
        found[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        found[f"{prefix}mlp.gate_proj.weight"] = (width, hidden)
        found[f"{prefix}mlp.up_proj.weight"] = (width, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = (hidden, width)
    found["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def locate_tensors(
    folder: Path, expected: Mapping[str, tuple[int, ...]], tied: bool, what: str = "model"
) -> dict[str, Path]:
    """The file of every expected tensor, from the files' headers alone.

    `tied`: a stored `lm_head.weight` should be a copy of the embedding, and is left out; `refuse_another_head` looks at
    its values. Raises `CheckpointError` naming the first tensor that is missing, unknown, in two files or of another
    shape, and its file.
    """
    located: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, shape in tensor_shapes(file):
            if name.endswith(IGNORED_SUFFIX) or (name == HEAD and tied and shape == expected.get(EMBEDDING)):
                continue
            if name not in expected:
                raise CheckpointError(f"{file}: tensor {name} is not in a {what} of this config")
            if shape != expected[name]:
                raise CheckpointError(
                    f"{file}: tensor {name} has shape {list(shape)}, config.json gives {list(expected[name])}"
                )
            if name in located:
                raise CheckpointError(f"{file}: tensor {name} is in {located[name].name} too; expected it in one file")
            located[name] = file
    missing = [name for name in expected if name not in located]
    if missing:
        raise CheckpointError(f"{folder}: tensor {missing[0]} is in no file ({len(missing)} missing in all)")
    return located


def refuse_another_head(folder: Path, tied: bool) -> None:
    """A tied model has one matrix; raises `CheckpointError` where the files hold a head other than the embedding.

    Names the tensor and its file. Comes after `locate_tensors`; without a stored head, or untied, no value is read.
    """
    stored = {name: file for file in weight_files(folder) for name, _ in tensor_shapes(file)} if tied else {}
    if HEAD not in stored:
        return
    from safetensors import safe_open

    with ExitStack() as stack:
        embedding, head = (
            stack.enter_context(safe_open(str(stored[name]), framework="pt")).get_slice(name)
            for name in (EMBEDDING, HEAD)
        )
        for start in range(0, head.get_shape()[0], COMPARED_ROWS):
            rows = slice(start, start + COMPARED_ROWS)
            if not same_values(embedding[rows], head[rows]):
                raise CheckpointError(f"{stored[HEAD]}: {ANOTHER_HEAD}")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same numbers, be it in two dtypes."""
    import torch

    return torch.equal(one, other) if one.dtype == other.dtype else torch.equal(one.double(), other.double())


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the index names, or the only one. Raises `CheckpointError` for one that is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index}: unreadable index ({error!r})") from None
        files = [folder / name for name in names]
    else:
        files = [folder / WEIGHTS_FILE]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: not found; expected {WEIGHTS_FILE}, or shards named by {INDEX_FILE}")
    return files


def tensor_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes from one file's header, in its order. Needs neither torch nor safetensors: `rl360 check` asks.

    The header is JSON behind its length, 8 bytes of little endian (the safetensors format).
    """
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            text = stream.read(size)
        if len(text) < size:
            raise ValueError(f"{len(text)} of {size} bytes of the header are there")
        tensors = {str(name): entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
        needed = 8 + size + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        if file.stat().st_size != needed:
            raise ValueError(f"{file.stat().st_size} bytes; its header says {needed}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: unreadable safetensors file ({error})") from None
    yield from shapes.items()


class WeightFiles:
    """An HF folder's tensors, open for reading; a context manager. The files are mapped, not loaded."""

    def __init__(self, folder: Path | str, config: DecoderConfig):
        self.folder = Path(folder)
        self.shapes = expected_tensors(config)
        self.files = locate_tensors(self.folder, self.shapes, config.tie_word_embeddings, config.model_type)
        refuse_another_head(self.folder, config.tie_word_embeddings)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def dtypes(self) -> dict[str, torch.dtype]:
        """Of every tensor, as its file holds it."""
        import torch

        known = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}
        found = {}
        for name in self.files:
            word = self._file(name).get_slice(name).get_dtype()
            if word not in known:
                raise CheckpointError(
                    f"{self.files[name]}: tensor {name} has dtype {word}; expected one of {', '.join(known)}"
                )
            found[name] = known[word]
        return found

    def read(self, name: str, axis: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The slice [start, stop) along `axis` (0 or 1) of a tensor, in the dtype that the file holds."""
        whole = self._file(name).get_slice(name)
        return whole[start:stop] if axis == 0 else whole[:, start:stop]

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = self._stack.enter_context(safe_open(str(file), framework="pt"))
        return self._open[file]
