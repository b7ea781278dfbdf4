"""Memory of a GPU given back for a while, to an engine that shares it.

In: the tensors of a rank that live from step to step. Out: their memory on the device is free until `onload`, their
values wait in page-locked host memory. Left to others: when (the trainer's driver), an engine's own memory, the host's
(rl360.trainers.host_memory).

The storage under the tensors is emptied and filled again, so every view of it (a weight in Megatron's buffer, an
optimizer's part of that weight) stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl360.trainers.host_memory import GIB, HostMemory

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
SCATTERED_BYTES = GIB  # free memory in one block with tensors that is worth moving those for


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    storage: torch.UntypedStorage
    size: int  # bytes
    offset: int | None  # where its values are in the host's memory; None: they are not kept


class Offloader:
    """Values of some storages on the host. Its memory is kept for the next time, since page-locking it is slow.

    That memory is as large as what was moved at most, and `close` gives it back.
    """

    def __init__(self) -> None:
        self._host: HostMemory | None = None
        self._moved: list[_Moved] = []

    @property
    def is_offloaded(self) -> bool:
        return bool(self._moved)

    @property
    def host_bytes(self) -> int:
        """Host memory that is held, offloaded or not."""
        return 0 if self._host is None else self._host.size

    def offload(self, keep: Iterable[Tensor], drop: Iterable[Tensor]) -> int:
        """Empty the storages of both; those of `drop` are zero after `onload`. Returns the bytes given back.

        Raises:
            InfrastructureError: the host has not that much memory; everything is still where it was.
        """
        assert not self.is_offloaded, "offloaded already"
        seen: set[int] = set()
        kept, dropped = _storages(keep, seen), _storages(drop, seen)
        cuda = any(storage.device.type == "cuda" for storage in kept + dropped)
        offsets, total = layout([storage.nbytes() for storage in kept])
        if self._host is None:
            self._host = HostMemory(pinned=cuda)
        self._host.reserve(total)
        moved = [
            *(_Moved(storage, storage.nbytes(), offset) for storage, offset in zip(kept, offsets, strict=True)),
            *(_Moved(storage, storage.nbytes(), None) for storage in dropped),
        ]
        for one in moved:
            self._copy(one, to_host=True)
        if cuda:
            torch.cuda.synchronize()
        self._moved = moved
        for one in moved:
            one.storage.resize_(0)
        if cuda:
            torch.cuda.ipc_collect()  # buckets that an engine has read and let go of are still counted as lent
            torch.cuda.empty_cache()
        return sum(one.size for one in moved)

    def onload(self) -> None:
        """Fill the storages again."""
        for one in self._moved:
            one.storage.resize_(one.size)
            if one.offset is None:
                _bytes(one.storage).zero_()
            else:
                self._copy(one, to_host=False)
        if any(one.storage.device.type == "cuda" for one in self._moved):
            torch.cuda.synchronize()
        self._moved = []

    def trim(self, keep: Sequence[Tensor], drop: Sequence[Tensor]) -> None:
        """Have no more of the device than these tensors and what else lives; those of `drop` may be zero afterwards.

        Moments that come with the first step lie in memory that its activations had, and hold all of it. Where that is
        much, they move to the host and back, which happens once: from then on they lie close together.
        """
        if keep and give_back() > SCATTERED_BYTES:
            self.offload(keep, drop)
            self.onload()

    def close(self) -> None:
        """Give the host's memory back. What is offloaded is lost."""
        self._moved = []
        if self._host is not None:
            self._host.close()
            self._host = None

    def _copy(self, one: _Moved, to_host: bool) -> None:
        """Queue the copies on the current stream."""
        if one.offset is None:
            return
        assert self._host is not None
        device, start = _bytes(one.storage), 0
        for host in self._host.pieces(one.offset, one.size):
            part = device[start : start + host.numel()]
            target, source = (host, part) if to_host else (part, host)
            target.copy_(source, non_blocking=True)
            start += host.numel()


def give_back() -> int:
    """Free memory that PyTorch's allocator keeps goes back to the device. Returns the bytes that cannot, since they lie
    in one block with tensors."""
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(where each block of so many bytes begins, how many bytes there must be), in their order, each aligned."""
    offsets, end = [], 0
    for size in sizes:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(offset)
        end = offset + size
    return offsets, end


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> list[torch.UntypedStorage]:
    """Each tensor's storage once, without empty ones and those in `seen`, which grows."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() > 0:
            seen.add(storage._cdata)
            found.append(storage)
    return found


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
