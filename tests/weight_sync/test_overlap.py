"""The next bucket is gathered while one is on its way. Who waits for the other here would wait in vain in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rl360.trainers.megatron.rank import MegatronRank
from rl360.weight_sync.buckets import Expectation
from rl360.weight_sync.sources import BucketSpec
from rl360.weight_sync.transports import HandleTransport

TIMEOUT_S = 30.0


class ThreeBuckets:
    """Says when each is being gathered; the fourth call says that there are no more."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.begun = [threading.Event() for _ in range(4)]
        self.released: list[int] = []

    def begin(self, *_: object) -> None:
        self.next = 0

    def prepare(self) -> BucketSpec | None:
        index, self.next = self.next, self.next + 1
        self.begun[index].set()
        return BucketSpec(index, ("w",), ("float32",), ((1,),), 4) if index < 3 else None

    def release(self, index: int) -> None:
        self.released.append(index)

    def expectation(self) -> Expectation:
        return Expectation()


async def test_a_pass_gathers_the_next_bucket_while_one_is_sent() -> None:
    source, sent = ThreeBuckets(), []
    transport = HandleTransport(1)
    transport._sources = [source]  # type: ignore[list-item]

    async def deliver(_: Any, spec: BucketSpec) -> bool:
        assert await asyncio.to_thread(source.begun[spec.index + 1].wait, TIMEOUT_S), "the next one was not begun"
        assert not any(event.is_set() for event in source.begun[spec.index + 2 :]), "two ahead: memory for both"
        sent.append(spec.index)
        return True

    await transport._pass(deliver)
    assert sent == source.released == [0, 1, 2]


@pytest.mark.parametrize("method", ["broadcast", "export", "release"])
async def test_a_rank_gathers_while_it_sends(method: str) -> None:
    both = threading.Barrier(2, timeout=TIMEOUT_S)

    def meet(name: str) -> Callable[..., str]:
        def wait(*_: object) -> str:
            both.wait()
            return name

        return wait

    rank = MegatronRank(SimpleNamespace(), TIMEOUT_S, 0)  # type: ignore[arg-type]
    rank._training = rank._weights_of = object()  # type: ignore[assignment]
    rank._weights = SimpleNamespace(prepare=meet("prepare"), source=SimpleNamespace(**{method: meet(method)}))  # type: ignore[assignment]
    found = await asyncio.gather(rank.send_weights("prepare", ()), rank.send_weights(method, (0, "g")))
    assert found == ["prepare", method]
    for thread in (rank._thread, rank._sending):
        thread.shutdown()
