"""A training rank on its GPU that says which optimizer it has. Runs in processes of its own only."""

from __future__ import annotations

from tests.trainers.megatron.gpu_rank import GpuRank


class TeGpuRank(GpuRank):
    async def optimizers(self) -> str:
        (name,) = {f"{type(a).__module__}.{type(a).__qualname__}" for a in self.training.optimizer.adams()}
        return name
