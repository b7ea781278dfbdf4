"""Ranks of trainer=megatron for train_step.py: one that says how far its start is, one that keeps its kernels' times,
and one that is alone where others would be.

In: what `MegatronRank` takes. Out: its replies, and lines in its log. A worker imports this file by its name.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from rl360.trainers.megatron.rank import MegatronRank

ONE_OF_CONTEXT = "RL360_BENCHMARK_ONE_OF_CONTEXT"  # for the rank's process


class BenchmarkRank(MegatronRank):
    """Says in its log how far its start is."""

    SAYS = "rank "

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = time.perf_counter()
        self._say("is here")

    def _say(self, text: str) -> None:
        print(f"{self.SAYS}{self.rank} {text} after {time.perf_counter() - self._began:.1f} s", flush=True)

    def _hardware(self) -> Any:
        self._say("has torch")
        return super()._hardware()

    def _train(self, device: Any, dtype: Any) -> Any:
        self._say("has met the others")
        training = super()._train(device, dtype)
        self._say("has weights, buffers and optimizer")
        return training


class ProfiledRank(BenchmarkRank):
    """Keeps what the last step's kernels took."""

    async def step(self, *args: Any) -> Any:
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as self.last:
            return await super().step(*args)

    def profiled(self, name: str) -> str:
        return f"{name}\n" + self.last.key_averages().table(
            sort_by="cuda_time_total", row_limit=40, max_name_column_width=90
        )


class ContextRank(BenchmarkRank):
    """The last of `ONE_OF_CONTEXT` context ranks, without the others: what it would get from them is its own."""

    def _join(self, host: str, port: int) -> None:
        from rl360.models.megatron import attention
        from rl360.models.megatron.spec import Layer
        from rl360.trainers.megatron import training

        size = int(os.environ[ONE_OF_CONTEXT])
        attention.distributed = CopiesForExchanges
        whole = training.Work.of

        def part(*inputs: Any, context_size: int, context_rank: int, **options: Any) -> Any:
            return whole(*inputs, context_size=size, context_rank=size - 1, **options)

        training.Work.of = part
        super()._join(host, port)
        for chunk in self.training.unwrapped():
            for layer in (module for module in chunk.modules() if isinstance(module, Layer)):
                layer.context_group = AloneOf(size)  # type: ignore[assignment]


@dataclass(frozen=True)
class AloneOf:
    ranks: int

    def size(self) -> int:
        return self.ranks


class CopiesForExchanges:
    """The two collectives of attention.py, as one rank's copies: as many bytes written, none sent."""

    @staticmethod
    def all_gather_into_tensor(out: Any, own: Any, group: AloneOf) -> None:
        out.view(group.size(), *own.shape).copy_(own)

    @staticmethod
    def reduce_scatter_tensor(own: Any, ranks: Any, group: AloneOf) -> None:
        import torch

        torch.sum(ranks.view(group.size(), *own.shape), dim=0, out=own)
