"""A flat bucket as the string that SGLang's /update_weights_from_tensor takes, and back.

In: a `FlatBucket`. Out: base64 of a pickle of {"flattened_tensor", "metadata"} in which the tensor is a handle: CUDA
IPC for a tensor on a GPU, a file in shared memory for one on the CPU (which only RL360's own engine can open). Metadata
are plain namespaces with SGLang's fields, so that the sender needs no sglang.

SGLang finds a GPU by its UUID (sglang/srt/utils/patch_torch.py), since an index means another device where
CUDA_VISIBLE_DEVICES differs; the handle is written the same way here.
"""

from __future__ import annotations

import base64
import copyreg
import io
import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl360.weight_sync.buckets import FlatBucket, TensorMeta

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rl360-weights-"
DEVICE_INDEX = 6  # of the device among the arguments of torch's rebuild_cuda_tensor (torch 2.11)
# What an engine of ours unpickles, and nothing else: the body comes over HTTP.
_ALLOWED = {
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("rl360.weight_sync.wire", "_open_shared"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ("torch", "float64"),
}


@contextmanager
def exported(bucket: FlatBucket) -> Iterator[str]:
    """The bucket as a string that other processes of this machine can open while the context lasts."""
    files: list[Path] = []

    def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if tensor.is_cuda:
            return _cuda_handle(tensor)
        path = _share(tensor)
        files.append(path)
        return _open_shared, (path.name, tensor.numel())

    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[torch.Tensor] = reduce_tensor
    metas = [
        SimpleNamespace(
            name=m.name,
            shape=torch.Size(m.shape),
            dtype=m.dtype,
            start_idx=m.start_idx,
            end_idx=m.end_idx,
            numel=m.numel,
        )
        for m in bucket.metas
    ]
    try:
        pickler.dump({"flattened_tensor": bucket.flat_B, "metadata": metas})
        yield base64.b64encode(buffer.getvalue()).decode()
    finally:
        for path in files:
            path.unlink(missing_ok=True)


def opened(text: str) -> FlatBucket:
    """A bucket that `exported` wrote, on the receiving side. Raises ValueError for anything else."""
    try:
        loaded = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        metas = tuple(TensorMeta(m.name, tuple(m.shape), m.dtype, m.start_idx, m.end_idx) for m in loaded["metadata"])
        return FlatBucket(loaded["flattened_tensor"], metas)
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError, OSError) as error:
        raise ValueError(
            f"serialized_named_tensors: not a flattened bucket that this engine can open: {error}"
        ) from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed here")
        return super().find_class(module, name)


def _share(tensor: Tensor) -> Path:
    path = SHARED_MEMORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        tensor.detach().contiguous().numpy().tofile(file)
    return path


def _open_shared(name: str, size: int) -> Tensor:
    if not name.startswith(PREFIX) or "/" in name:
        raise pickle.UnpicklingError(f"{name!r} is not shared memory of a weight sync")
    # Copy on write: what the receiver does to it is its own, and nothing is read before it is needed.
    return torch.from_numpy(np.memmap(SHARED_MEMORY / name, dtype=np.uint8, mode="c", shape=(size,)))


def _cuda_handle(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    from torch.multiprocessing import reductions

    rebuild, arguments = reductions.reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:DEVICE_INDEX], uuid, *arguments[DEVICE_INDEX + 1 :])
