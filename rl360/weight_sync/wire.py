"""A flat bucket as the string that SGLang's /update_weights_from_tensor takes, and back.

In: a `FlatBucket`. Out: base64 of a pickle of {"flattened_tensor", "metadata"} in which the tensor is a handle: CUDA
IPC for a tensor on a GPU, memory of this process for one on the CPU (which only RL360's own engine can open). Metadata
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
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl360.weight_sync.buckets import FlatBucket, TensorMeta

MEMORY = "rl360-weights-"  # a file without a name (memfd): it goes with the process, however that ends
_PLACE = re.compile(r"\d+/fd/\d+")  # of it, under /proc
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
    handles: list[int] = []

    def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if tensor.is_cuda:
            return _cuda_handle(tensor)
        name = f"{MEMORY}{secrets.token_hex(8)}"  # numbers of handles are used again, and a reader may come late
        handles.append(_share(tensor, name))
        return _open_shared, (f"{os.getpid()}/fd/{handles[-1]}", name, tensor.numel())

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
        for handle in handles:
            os.close(handle)


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


def _share(tensor: Tensor, name: str) -> int:
    handle = os.memfd_create(name)
    try:
        with open(handle, "wb", closefd=False) as file:
            tensor.detach().contiguous().numpy().tofile(file)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open_shared(place: str, name: str, size: int) -> Tensor:
    if not (_PLACE.fullmatch(place) and name.startswith(MEMORY)):
        raise pickle.UnpicklingError(f"{place!r}, {name!r} is not shared memory of a weight sync")
    with open(f"/proc/{place}", "rb") as file:
        if os.readlink(f"/proc/self/fd/{file.fileno()}") != f"/memfd:{name} (deleted)":
            raise pickle.UnpicklingError(f"{place} is not {name} any more")
        # Copy on write: what the receiver does to it is its own, and nothing is read before it is needed.
        return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c", shape=(size,)))


def _cuda_handle(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    from torch.multiprocessing import reductions

    rebuild, arguments = reductions.reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:DEVICE_INDEX], uuid, *arguments[DEVICE_INDEX + 1 :])
