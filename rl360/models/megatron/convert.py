"""Weights between a Hugging Face folder and Megatron's own checkpoint format, both ways, bit for bit.

In: an HF folder, or a torch_dist folder. Out: the other. Megatron's side is what its training scripts load:
`release/` (layers stacked, tensors named as `GPTModel.sharded_state_dict` names them), beside
`latest_checkpointed_iteration.txt` that says `release`, and `hf/` with config and tokenizer for the way back. Left to
others: index arithmetic (hf_weights.py), files (torch_dist.py, rl360.models.hf_folder), training state.

Tensors are read, rearranged and written one at a time, so a process holds one layer's matrix, not a model. Under
torchrun every rank does its share; the result is the same for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rl360.errors import CheckpointError
from rl360.models.architecture import DECIDE_WEIGHTS, another_model, identity
from rl360.models.decoder import DecoderConfig
from rl360.models.hf_folder import DEFAULT_SHARD_BYTES, LazyTensor, Ranks, new_folder, write_weights
from rl360.models.loading import CONFIG_FILE, copy_companions, read_config
from rl360.models.megatron import hf_weights, torch_dist
from rl360.models.megatron.torch_dist import Box, Object, Reader
from rl360.models.weight_files import WeightFiles, expected_tensors

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMPANIONS = "hf"  # config and tokenizer, so that the folder is enough for the way back

# What Megatron's training reads beside tensors. Version 3: q, k, v lie group by group.
COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    },
}
# Modules whose checkpoint has an `_extra_state` (nothing, without fp8), which a loading model insists on: the linear
# layers of Megatron's own specs, and those that Transformer Engine's add.
EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)

MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")  # a checkpoint's other tensors are the optimizer's

Progress = Callable[[int, int], None]
"""(bytes that this rank has done, bytes of this rank in all)."""


def _quiet(done: int, total: int) -> None:
    """No progress shown."""


def to_megatron(source: Path | str, out: Path | str, ranks: Ranks | None = None, progress: Progress = _quiet) -> None:
    """Make the Megatron folder `out` from the HF folder `source`, in the files' own dtypes.

    Raises `ConfigError` for a bad config.json or an `out` that is in the way, and `CheckpointError`, before anything is
    written, naming the first tensor that does not fit the config, and its file.
    """
    source, out, ranks = Path(source), Path(out), ranks or Ranks()
    config = read_config(source)
    with WeightFiles(source, config) as files:
        boxes = _share(_boxes(config, files), ranks)
        count = _Counter(sum(prod(box.shape) * box.dtype.itemsize for box in boxes), progress)
        with new_folder(out, ranks) as staging, ranks.together():
            torch_dist.write(
                staging / RELEASE,
                boxes,
                COMMON,
                extra_states(config) if ranks.rank == 0 else [],
                ranks.group,
                lambda box: count.add(prod(box.shape) * box.dtype.itemsize),
            )
            if ranks.rank == 0:
                copy_companions(source, staging / COMPANIONS)
                (staging / TRACKER_FILE).write_text(RELEASE)


def to_hf(
    source: Path | str,
    out: Path | str,
    companions: Path | str | None = None,
    ranks: Ranks | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress = _quiet,
) -> None:
    """Make the HF folder `out` from a torch_dist checkpoint, in the dtypes that it holds.

    source: a folder with `latest_checkpointed_iteration.txt`, or one iteration's folder; optimizer state in it is left
    alone. companions: the folder with config.json and tokenizer; None: the `hf/` beside the weights.

    Raises `ConfigError` and `CheckpointError` as `to_megatron` does.
    """
    out, ranks = Path(out), ranks or Ranks()
    folder = weights_folder(Path(source))
    own = next((place for place in _companion_places(folder) if place.is_dir()), None)
    if own is None and companions is None:
        raise CheckpointError(
            f"{folder}: no {COMPANIONS}/ with config.json in it or beside it; name the model's HF folder"
        )
    companions = Path(companions) if companions is not None else own
    assert companions is not None
    config = read_config(companions)
    tensors = _lazy_tensors(config, Reader(folder))
    if own is not None and own != companions:
        _refuse_another_model(config, companions, read_config(own), own)
    mine = sum(tensor.num_bytes for tensor in tensors) // ranks.size
    count = _Counter(mine, progress)
    with new_folder(out, ranks) as staging:
        write_weights(staging, tensors, ranks, max_shard_bytes, count.add)
        with ranks.together():
            if ranks.rank == 0:
                copy_companions(companions, staging, tensors[0].dtype)


def weights_folder(folder: Path) -> Path:
    """The torch_dist folder meant by `folder`: itself, or the one that `latest_checkpointed_iteration.txt` names."""
    if (folder / torch_dist.METADATA).is_file():
        return folder
    tracker = folder / TRACKER_FILE
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected a Megatron checkpoint")
    if not tracker.is_file():
        raise CheckpointError(f"{folder}: no Megatron checkpoint; expected {TRACKER_FILE}, or {torch_dist.METADATA}")
    word = tracker.read_text(errors="replace").strip()
    if word != RELEASE and not word.isdigit():
        raise CheckpointError(f"{tracker}: says {word!r}; expected {RELEASE} or the number of an iteration")
    return folder / (word if word == RELEASE else f"iter_{int(word):07d}")


def _companion_places(folder: Path) -> tuple[Path, Path]:
    return folder / COMPANIONS, folder.parent / COMPANIONS


def _refuse_another_model(config: DecoderConfig, chosen: Path, own: DecoderConfig, beside: Path) -> None:
    """Heads can be cut otherwise, and a vocabulary be shorter, with every shape in place: the values would be wrong."""
    if (difference := another_model(config, identity(own), DECIDE_WEIGHTS)) is not None:
        raise CheckpointError(f"{chosen / CONFIG_FILE}: {difference} ({beside / CONFIG_FILE})")


# ---- HF to Megatron


def _boxes(config: DecoderConfig, files: WeightFiles) -> list[Box]:
    """Each layer's part of each stacked tensor. Raises `CheckpointError` where one would be of two dtypes."""
    dtypes = files.dtypes()
    found = []
    for name in hf_weights.parameter_names(config):
        shape = hf_weights.parameter_shape(name, config)
        sources = {part.hf_name: dtypes[part.hf_name] for part in hf_weights.parts(name, config)}
        if len(set(sources.values())) > 1:
            raise CheckpointError(f"{files.folder}: of different dtypes, but one matrix in Megatron: {sources}")
        dtype = next(iter(sources.values()))
        keys, layer = hf_weights.stacked_keys(name)
        for key in keys:

            def values(name: str = name, dtype: torch.dtype = dtype) -> Tensor:
                return _megatron_tensor(name, config, files, dtype)

            if layer is None:
                found.append(Box(key, shape, (0,) * len(shape), shape, dtype, values))
            else:
                whole, offset = (config.num_layers, *shape), (layer, *(0,) * len(shape))
                found.append(Box(key, whole, offset, (1, *shape), dtype, values))
    return found


def _megatron_tensor(name: str, config: DecoderConfig, files: WeightFiles, dtype: torch.dtype) -> Tensor:
    value = torch.zeros(hf_weights.parameter_shape(name, config), dtype=dtype)  # zeros: the padded vocabulary
    for part in hf_weights.parts(name, config):
        source = files.read(part.hf_name, part.axis, part.start, part.start + part.length)
        value.narrow(part.axis, part.at, part.length).copy_(source)
    return value


def _share(boxes: Sequence[Box], ranks: Ranks) -> list[Box]:
    """This rank's boxes: the largest first, each to whom has least so far."""
    loads = [0] * ranks.size
    mine = []
    for box in sorted(boxes, key=lambda box: prod(box.shape) * box.dtype.itemsize, reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += prod(box.shape) * box.dtype.itemsize
        if lightest == ranks.rank:
            mine.append(box)
    return mine


def extra_states(config: DecoderConfig) -> list[Object]:
    """The empty `_extra_state` of every module that may have one."""
    per_layer = [
        Object(f"{hf_weights.LAYERS}{module}._extra_state", None, layer, config.num_layers)
        for module in EXTRA_STATES
        for layer in range(config.num_layers)
    ]
    return [*per_layer, Object("decoder.final_layernorm._extra_state", None)]


# ---- Megatron to HF


def _lazy_tensors(config: DecoderConfig, reader: Reader) -> list[LazyTensor]:
    """Every HF tensor, in the order of the layers. Raises `CheckpointError` for the first that does not fit."""
    shapes = expected_tensors(config)

    @lru_cache(maxsize=1)  # q, k and v come from one matrix, one after the other
    def parameter(key: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
        if layer is None:
            return reader.read(key, (0,) * len(shape), shape)
        return reader.read(key, (layer, *(0,) * len(shape)), (1, *shape))[0]

    found = []
    for name in hf_weights.parameter_names(config):
        key, layer, shape = _locate(name, config, reader)
        parts = hf_weights.parts(name, config)
        for hf_name in dict.fromkeys(part.hf_name for part in parts):

            def values(
                hf_name: str = hf_name,
                source: tuple[str, int | None, tuple[int, ...]] = (key, layer, shape),
                parts: Sequence[hf_weights.Part] = parts,
            ) -> Tensor:
                matrix = parameter(*source)
                value = torch.empty(shapes[hf_name], dtype=matrix.dtype)
                for part in parts:
                    if part.hf_name == hf_name:
                        piece = matrix.narrow(part.axis, part.at, part.length)
                        value.narrow(part.axis, part.start, part.length).copy_(piece)
                return value

            found.append(LazyTensor(hf_name, shapes[hf_name], reader.dtype(key), values))
    refuse_unknown(reader, config)
    return found


def refuse_unknown(reader: Reader, config: DecoderConfig) -> None:
    """Raises `CheckpointError` for the first of the model's tensors that an architecture of this config has not."""
    names = hf_weights.parameter_names(config)
    known = {key for name in names for key in (*hf_weights.stacked_keys(name)[0], *_unstacked(name))}
    for key in sorted(reader.names()):
        if key.startswith(MODEL_PREFIXES) and key not in known:
            raise CheckpointError(
                f"{reader.folder / torch_dist.METADATA}: tensor {key} is not in a {config.model_type} of this config"
            )


def _unstacked(name: str) -> list[str]:
    """A parameter's names in a checkpoint where each layer has tensors of its own."""
    keys, layer = hf_weights.stacked_keys(name)
    return [key.replace(hf_weights.LAYERS, f"{hf_weights.LAYERS}{layer}.", 1) for key in keys]


def _locate(name: str, config: DecoderConfig, reader: Reader) -> tuple[str, int | None, tuple[int, ...]]:
    """(key, layer in it, shape to read) of a parameter: stacked, or in a tensor of its layer alone."""
    keys, layer = hf_weights.stacked_keys(name)
    key = next((key for key in (*keys, *_unstacked(name)) if key in reader), None)
    if key is None:
        raise CheckpointError(f"{reader.folder}: tensor {keys[0]} is not in this checkpoint")
    in_layer = layer if key in keys else None
    shape = hf_weights.parameter_shape(name, config)
    if name in (hf_weights.EMBEDDING, hf_weights.HEAD):
        shape = (config.vocab_size, config.hidden_size)  # padding depends on who wrote it
    stored = reader.shape(key)
    wanted = shape if in_layer is None else (config.num_layers, *shape)
    fits = stored == wanted
    if name in (hf_weights.EMBEDDING, hf_weights.HEAD):
        fits = len(stored) == 2 and stored[0] >= wanted[0] and stored[1] == wanted[1]
    if not fits:
        raise CheckpointError(
            f"{reader.folder / torch_dist.METADATA}: tensor {key} has shape {list(stored)}, config.json gives "
            f"{list(wanted)}"
        )
    return key, in_layer, shape


class _Counter:
    def __init__(self, total: int, progress: Progress):
        self._done, self._total, self._progress = 0, total, progress

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(min(self._done, self._total), self._total)
