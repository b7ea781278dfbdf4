"""The tensors of a Hugging Face folder, by name and by slice, checked against the chosen architecture first.

In: a folder with *.safetensors (one file, or shards with an index) and a `DecoderConfig`. Out: which file holds which
tensor, and slices read from it without loading the rest. Left to others: what the slices are for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
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
# The format's dtypes, and bytes a value. Weights are of these: others mean something only with scales beside them.
FLOATS = ("F32", "F64", "F16", "BF16")
ITEMSIZES = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
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
    its values. Raises `CheckpointError` naming the first tensor that is missing, unknown, in two files, of another
    shape or no floating-point numbers, and its file.
    """
    located: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, (dtype, shape) in read_header(file).items():
            if name.endswith(IGNORED_SUFFIX) or (name == HEAD and tied and shape == expected.get(EMBEDDING)):
                continue
            if name not in expected:
                raise CheckpointError(f"{file}: tensor {name} is not in a {what} of this config")
            if shape != expected[name]:
                raise CheckpointError(
                    f"{file}: tensor {name} has shape {list(shape)}, config.json gives {list(expected[name])}"
                )
            if dtype not in FLOATS:
                raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; expected one of {', '.join(FLOATS)}")
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
    files = [folder / WEIGHTS_FILE]
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError("expected a file's name for each tensor")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: unreadable index ({error!r})") from None
        files = [folder / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file}: not found{stray_shards(folder)}; expected {WEIGHTS_FILE}, or shards named by {INDEX_FILE}"
            )
    return files


def stray_shards(folder: Path) -> str:
    """Said beside a file that is not there: shards that no index names, as a download that was cut leaves them."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found or (folder / INDEX_FILE).is_file():
        return ""
    return f" ({found[0]}{' and others are' if found[1:] else ' is'} there, and no {INDEX_FILE})"


def tensor_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes from one file's header, in its order; see `read_header`."""
    yield from ((name, shape) for name, (_, shape) in read_header(file).items())


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype as the format spells it, shape)} of one file, in its order, the whole header looked at.

    The header is JSON behind its length, 8 bytes of little endian; the tensors' bytes follow without a gap (the
    safetensors format). Needs neither torch nor safetensors: `rl360 check` asks. Raises `CheckpointError` for a file
    that is not what its header says.
    """
    try:
        actual = file.stat().st_size
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"truncated, or no such file: a header of {size} bytes, {actual} in all")
            text = stream.read(size)
        if len(text) < size or actual < 8:
            raise ValueError(f"truncated: {len(text)} of {size} bytes of the header are there")
        entries = {str(name): entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        found, places = {}, []
        for name, entry in entries.items():
            dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
            begin, end = map(int, entry["data_offsets"])
            itemsize = ITEMSIZES.get(dtype)
            if min(shape, default=0) < 0 or (itemsize is not None and end - begin != itemsize * prod(shape)):
                raise ValueError(f"tensor {name}: {end - begin} bytes for {dtype} of shape {list(shape)}")
            found[name] = (dtype, shape)
            places.append((begin, end, name))
        needed = 0
        for begin, end, name in sorted(places):
            if begin != needed:
                raise ValueError(f"tensor {name} begins at byte {begin}; the one before ends at {needed}")
            needed = end
        if actual != 8 + size + needed:
            raise ValueError(f"{actual} bytes; its header says {8 + size + needed}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"no {error} in its header" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{file}: unreadable safetensors file ({why})") from None
    return found


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

        known = dict(zip(FLOATS, (torch.float32, torch.float64, torch.float16, torch.bfloat16), strict=True))
        return {name: known[self._file(name).get_slice(name).get_dtype()] for name in self.files}

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
