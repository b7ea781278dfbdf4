"""Where weights come from: the process that holds the tensors, bucket by bucket.

In: an iterator of (HF name, tensor). Out: handles of buckets, or broadcasts of them. A trainer that has its tensors in
this process is a `TensorSource`; one whose ranks are other processes builds a `TensorSource` in each of them and offers
the same methods from here (each blocks, and is called from helper threads). Engines are left to .transports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from rl360.errors import ConfigError
from rl360.weight_sync.buckets import Expectation, FlatBucket, bucketed, flatten
from rl360.weight_sync.groups import join_group, leave_group
from rl360.weight_sync.wire import exported

if TYPE_CHECKING:
    import torch

Tensors = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """What a receiver must know of a bucket before it comes."""

    index: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # "bfloat16"
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int


class WeightSource(Protocol):
    """One pass: `begin`, then `prepare` until it returns None; a bucket lives from its `prepare` to its `release`."""

    address: str  # where engines meet it for a process group

    def names(self) -> Sequence[str]: ...  # of every tensor that a pass yields
    # dtype: what engines hold; None: as it is. ways: their tensor-parallel sizes, for hashes of what their ranks hold
    def begin(self, bucket_bytes: int, dtype: str | None, ways: Sequence[int] = (1,)) -> None: ...
    def prepare(self) -> BucketSpec | None: ...  # gather and lay flat the next bucket; None: that was all
    def export(self, index: int, count: int) -> list[str]: ...  # handles, one for each process that will open it
    def join(self, name: str, port: int, world_size: int, backend: str) -> None: ...  # as rank 0 of a new group
    def broadcast(self, index: int, name: str) -> None: ...
    def leave(self, name: str, broken: bool) -> None: ...  # broken: cut a broadcast off that nobody ends
    def release(self, index: int) -> None: ...
    def expectation(self) -> Expectation: ...  # of the pass that ended


class TensorSource:
    """Implements `WeightSource` for tensors of this process.

    Args:
        tensors: starts an iteration over all weights, in the order in which they are sent. It may gather (a collective
            over other ranks), and is advanced from one helper thread at a time.
        names: of what that yields; None: the iteration is run once for its names alone.
        address: of this machine, as engines reach it.
        hashing: whether to hash what is sent; off where nobody compares.
        group_timeout_s: for the others to come to a group, and for one broadcast.
        kv_heads: key/value heads of the model; None: q, k, v of an engine with several ranks are not compared.
    """

    def __init__(
        self,
        tensors: Tensors,
        address: str = "127.0.0.1",
        hashing: bool = True,
        group_timeout_s: float = 60.0,
        kv_heads: int | None = None,
        names: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.address = address
        self._tensors = tensors
        self._names = names
        self._hashing = hashing
        self._group_timeout_s = group_timeout_s
        self._kv_heads = kv_heads
        self._groups_iterator: Iterator[list[tuple[str, Tensor]]] = iter(())
        self._expectation = Expectation()
        self._buckets: dict[int, tuple[FlatBucket, ExitStack]] = {}
        self._complete: dict[int, torch.cuda.Event] = {}  # the copy into the bucket, on the stream that gathers
        self._sending: torch.cuda.Stream | None = None
        self._groups: dict[str, Any] = {}
        self._count = 0
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return list(self._names()) if self._names is not None else [name for name, _ in self._tensors()]

    def begin(self, bucket_bytes: int, dtype: str | None, ways: Sequence[int] = (1,)) -> None:
        import torch

        for index in list(self._buckets):
            self.release(index)
        named: Iterable[tuple[str, Tensor]] = self._tensors()
        if dtype is not None:
            wanted = getattr(torch, dtype)
            named = ((name, tensor.detach().to(wanted)) for name, tensor in named)
        self._groups_iterator = bucketed(named, bucket_bytes)
        self._expectation = Expectation(tuple(ways), self._kv_heads)
        self._count = 0

    def prepare(self) -> BucketSpec | None:
        import torch

        with self._lock:
            named = next(self._groups_iterator, None)
            if named is None:
                return None
            bucket = flatten(named)
            if self._hashing:
                self._expectation.add(list(bucket.tensors()))
            index, self._count = self._count, self._count + 1
            self._buckets[index] = (bucket, ExitStack())
            if bucket.flat_B.is_cuda:
                self._complete[index] = torch.cuda.current_stream(bucket.flat_B.device).record_event()
        return BucketSpec(
            index,
            tuple(meta.name for meta in bucket.metas),
            tuple(str(meta.dtype).removeprefix("torch.") for meta in bucket.metas),
            tuple(meta.shape for meta in bucket.metas),
            bucket.flat_B.numel(),
        )

    def export(self, index: int, count: int) -> list[str]:
        """A handle counts its readers, so each reader gets one of its own."""
        bucket, handles = self._buckets[index]
        if index in self._complete:
            self._complete[index].synchronize()  # the copy into the bucket is complete before it is read
        return [handles.enter_context(exported(bucket)) for _ in range(count)]

    def join(self, name: str, port: int, world_size: int, backend: str) -> None:
        self._groups[name] = join_group(self.address, port, 0, world_size, name, backend, self._group_timeout_s)

    def broadcast(self, index: int, name: str) -> None:
        import torch
        import torch.distributed as dist

        flat_B = self._buckets[index][0].flat_B
        if not flat_B.is_cuda:
            dist.broadcast(flat_B, src=0, group=self._groups[name])
            return
        # A stream of its own: on the one that gathers, the next bucket would wait for this one to be sent.
        if self._sending is None:
            self._sending = torch.cuda.Stream(flat_B.device)
        with torch.cuda.stream(self._sending):
            self._sending.wait_event(self._complete[index])
            dist.broadcast(flat_B, src=0, group=self._groups[name])
        self._sending.synchronize()

    def leave(self, name: str, broken: bool) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            leave_group(group, broken)

    def release(self, index: int) -> None:
        _, handles = self._buckets.pop(index)
        self._complete.pop(index, None)
        handles.close()

    def expectation(self) -> Expectation:
        return self._expectation


def decoder_source(trainer: Any, address: str = "127.0.0.1") -> TensorSource:
    """The source of a trainer that has an HF-named decoder in this process (rl360.trainers.torch_trainer)."""
    decoder = trainer.decoder
    return TensorSource(
        lambda: ((n, p.detach()) for n, p in decoder.named_parameters()), address, kv_heads=decoder.config.num_kv_heads
    )


def sources_of(trainer: Any) -> Sequence[WeightSource]:
    """A trainer's own `weight_sources()` (one for each pipeline stage, say), else its decoder.

    Raises ConfigError for one that has neither.
    """
    if hasattr(trainer, "weight_sources"):
        sources: Sequence[WeightSource] = trainer.weight_sources()
        return sources
    if getattr(trainer, "decoder", None) is None:
        raise ConfigError(
            f"rollout.sync: {type(trainer).__name__} has neither weight_sources nor a decoder, which ipc and nccl send "
            "from; expected one of them, try rollout.sync=disk"
        )
    return [decoder_source(trainer)]
