"""The policy as a Hugging Face folder, each pipeline stage writing its own layers.

In: the training ranks' model chunks. Out: safetensors files with whole tensors, and which tensor is in which file. Left
to others: config, tokenizer, the index and making the folder whole (trainer.py), which tensor is what
(rl360.models.megatron.hf_weights).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rl360.models.hf_folder import DEFAULT_SHARD_BYTES, LazyTensor, write_safetensors
from rl360.models.megatron.hf_weights import hf_tensors

if TYPE_CHECKING:
    from rl360.trainers.megatron.training import Training


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written."""

    files: dict[str, str] = field(default_factory=dict)  # tensor name -> file name
    num_bytes: int = 0
    dtype: str = ""


def write_stage(training: Training, folder: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> Written:
    """Write this pipeline stage's tensors into `folder`, in the weights' dtype.

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
    for name, tensor in hf_tensors(training.unwrapped(), training.config, training.settings.layout):
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
    return Written(files, total, dtype)


def _held(name: str, value: Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(value.shape), value.dtype, lambda: value)
