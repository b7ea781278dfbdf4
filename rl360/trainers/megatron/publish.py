"""The policy as a Hugging Face folder, each pipeline stage writing its own layers.

In: the training ranks' model chunks. Out: safetensors files with whole tensors, hashes of them, and, from the driver,
what a reader needs beside the weights. Left to others: making the folder whole (trainer.py), which tensor is what
(rl360.models.megatron.hf_weights).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl360.models.hf_folder import DEFAULT_SHARD_BYTES, LazyTensor, write_safetensors
from rl360.models.loading import copy_companions
from rl360.models.megatron.hf_weights import hf_tensors
from rl360.models.weight_files import INDEX_FILE, WEIGHTS_FILE
from rl360.weight_sync.buckets import Expectation
from rl360.weight_sync.folder import hashing

if TYPE_CHECKING:
    from rl360.trainers.megatron.training import Training


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written."""

    files: dict[str, str] = field(default_factory=dict)  # tensor name -> file name
    num_bytes: int = 0
    dtype: str = ""
    expectation: Expectation | None = None  # of engines that load it; None: it wrote nothing, or nobody asked


def write_stage(
    training: Training,
    folder: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    engine_dtype: str | None = None,
    ways: Sequence[int] = (),
) -> Written:
    """Write this pipeline stage's tensors into `folder`, in the weights' dtype.

    With `ways` (tensor-parallel sizes of engines that hold `engine_dtype`; None: the weights') each is hashed on the
    device that it comes from, before it is copied to host memory.

    A collective over the tensor ranks of the first data and context rank; the first of them writes. Other ranks hold
    the same weights and do nothing. At most one shard is held in host memory.
    """
    place = training.place
    if place.data or place.context:
        return Written()
    writes = place.tensor == 0
    files: dict[str, str] = {}
    shard: list[LazyTensor] = []

    def flush() -> None:
        if shard:
            name = f"model-stage{place.pipeline:03d}-{len(set(files.values())):03d}.safetensors"
            write_safetensors(folder / name, shard, lambda num_bytes: None)
            files.update({tensor.name: name for tensor in shard})
            shard.clear()

    filled = total = 0
    dtype = ""
    expectation = Expectation(tuple(ways), training.config.num_kv_heads) if ways and writes else None
    tensors = hf_tensors(training.unwrapped(), training.config, training.settings.layout)
    for name, tensor in hashing(tensors, expectation, engine_dtype):
        if not writes:
            continue
        if filled + tensor.nbytes > max_shard_bytes:
            flush()
            filled = 0
        shard.append(_held(name, tensor.cpu()))
        filled += tensor.nbytes
        total += tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    return Written(files, total, dtype, expectation)


def complete(folder: Path, written: Sequence[Written], model_dir: Path) -> None:
    """In the driver, once all stages have written: config, tokenizer, and one file under its own name, or an index."""
    files = {name: file for part in written for name, file in part.files.items()}
    copy_companions(model_dir, folder, dtype=getattr(torch, written[0].dtype))
    if len(set(files.values())) == 1:
        (folder / next(iter(files.values()))).rename(folder / WEIGHTS_FILE)
    else:
        total = sum(part.num_bytes for part in written)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def hashes_of(written: Sequence[Written], ways: tuple[int, ...]) -> Expectation:
    """All stages' hashes together."""
    expectation = Expectation(ways)
    for part in written:
        if part.expectation is not None:
            expectation.merge(part.expectation)
    return expectation


def _held(name: str, value: Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(value.shape), value.dtype, lambda: value)
