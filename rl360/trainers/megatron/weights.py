"""Weights on their way from the training ranks to engines, whole tensors under HF names.

In: the driver's calls to the ranks of one pipeline stage. Out: `StageSource`s, which rl360.weight_sync drives as any
other source: the stage's first rank sends, its other tensor ranks only take part in gathering. Left to others: which
tensor is what (rl360.models.megatron.hf_weights), engines and groups (rl360.weight_sync).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rl360.models.megatron.hf_weights import hf_names, hf_tensors
from rl360.models.megatron.layout import Layout, Place
from rl360.weight_sync.buckets import Expectation
from rl360.weight_sync.sources import BucketSpec, TensorSource

if TYPE_CHECKING:
    from rl360.trainers.megatron.training import Training


class RankWeights:
    """In a rank: the stage's tensors. `sends` False: gather with the others, keep nothing."""

    def __init__(self, training: Training, address: str, timeout_s: float) -> None:
        self.sends = training.place.tensor == 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            return hf_tensors(training.unwrapped(), training.config, training.settings.layout)

        self.source = TensorSource(
            tensors,
            address,
            hashing=self.sends,
            group_timeout_s=timeout_s,
            kv_heads=training.config.num_kv_heads,
            names=lambda: hf_names(training.unwrapped(), training.config, training.settings.layout),
        )

    def prepare(self) -> BucketSpec | None:
        spec = self.source.prepare()
        if spec is not None and not self.sends:
            self.source.release(spec.index)
        return spec


class StageSource:
    """In the driver: implements rl360.weight_sync.sources.WeightSource for one pipeline stage.

    Args:
        workers: the ranks.
        stage: which pipeline rank.
        address: of the machine that its first rank runs on, as engines reach it.
        timeout_s: of one call.
    """

    def __init__(self, workers: Any, layout: Layout, stage: int, address: str, timeout_s: float) -> None:
        self.address = address
        self._workers = workers
        self._ranks = [layout.rank(Place(tensor, 0, 0, stage)) for tensor in range(layout.tensor)]
        self._timeout_s = timeout_s

    def names(self) -> list[str]:
        names: list[str] = self._sender("names")
        return names

    def begin(self, bucket_bytes: int, dtype: str | None, ways: Sequence[int] = (1,)) -> None:
        self._everyone("begin", bucket_bytes, dtype, tuple(ways))

    def prepare(self) -> BucketSpec | None:
        spec: BucketSpec | None = self._everyone("prepare")
        return spec

    def export(self, index: int, count: int) -> list[str]:
        handles: list[str] = self._sender("export", index, count)
        return handles

    def join(self, name: str, port: int, world_size: int, backend: str) -> None:
        self._sender("join", name, port, world_size, backend)

    def broadcast(self, index: int, name: str) -> None:
        self._sender("broadcast", index, name)

    def leave(self, name: str, broken: bool) -> None:
        self._sender("leave", name, broken)

    def release(self, index: int) -> None:
        self._sender("release", index)

    def expectation(self) -> Expectation:
        expectation: Expectation = self._sender("expectation")
        return expectation

    def _sender(self, method: str, *args: Any) -> Any:
        return asyncio.run(self._workers.call(self._ranks[0], "send_weights", method, args, timeout_s=self._timeout_s))

    def _everyone(self, method: str, *args: Any) -> Any:
        """The same call to every rank of the stage; the first one's result."""

        async def gather() -> list[Any]:
            calls = (
                self._workers.call(rank, "send_weights", method, args, timeout_s=self._timeout_s)
                for rank in self._ranks
            )
            return await asyncio.gather(*calls)

        return asyncio.run(gather())[0]
