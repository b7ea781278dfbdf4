"""Memory of a GPU given back for a while, to an engine that shares it.

In: the tensors of a rank that live from step to step. Out: their memory on the device is free until `onload`, their
values wait in pinned host memory. Left to others: when (the trainer's driver), an engine's own memory.

The storage under the tensors is emptied and filled again, so every view of it (a weight in Megatron's buffer, an
optimizer's part of that weight) stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offloader:
    """Host copies of some storages; the host memory is kept for the next time, since pinning it is slow."""

    def __init__(self) -> None:
        self._host: dict[int, Tensor] = {}  # by the storage object's id: it stays the same while it is empty
        self._moved: list[tuple[torch.UntypedStorage, int, bool]] = []  # storage, bytes, whether its values are kept

    @property
    def is_offloaded(self) -> bool:
        return bool(self._moved)

    def offload(self, keep: Iterable[Tensor], drop: Iterable[Tensor]) -> int:
        """Empty the storages of both; those of `drop` are zero after `onload`. Returns the bytes given back."""
        assert not self.is_offloaded, "offloaded already"
        seen: set[int] = set()
        cuda = False
        for tensors, kept in ((keep, True), (drop, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata in seen or storage.nbytes() == 0:
                    continue
                seen.add(storage._cdata)
                cuda |= tensor.is_cuda
                if kept:
                    self._host_copy(storage).copy_(_bytes(storage), non_blocking=True)
                self._moved.append((storage, storage.nbytes(), kept))
        if cuda:
            torch.cuda.synchronize()
        for storage, _, _ in self._moved:
            storage.resize_(0)
        if cuda:
            torch.cuda.ipc_collect()  # buckets that an engine has read and let go of are still counted as lent
            torch.cuda.empty_cache()
        return sum(size for _, size, _ in self._moved)

    def onload(self) -> None:
        """Fill the storages again."""
        for storage, size, kept in self._moved:
            storage.resize_(size)
            whole = _bytes(storage)
            if kept:
                whole.copy_(self._host[storage._cdata], non_blocking=True)
            else:
                whole.zero_()
        if any(storage.device.type == "cuda" for storage, _, _ in self._moved):
            torch.cuda.synchronize()
        self._moved = []

    def _host_copy(self, storage: torch.UntypedStorage) -> Tensor:
        host = self._host.get(storage._cdata)
        if host is None or host.numel() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._host[storage._cdata] = host
        return host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
