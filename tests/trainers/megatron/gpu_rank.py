"""A training rank on its GPU, with what tests ask of it. Runs in processes of its own only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl360.trainers.megatron.rank import MegatronRank
from tests.trainers.megatron.cpu_rank import CpuRank


class GpuRank(CpuRank):
    dtype = torch.bfloat16
    backend = "nccl"

    def _hardware(self) -> tuple[torch.device, torch.dtype, str]:
        return MegatronRank._hardware(self)

    def _train(self, device: torch.device, dtype: torch.dtype) -> Any:
        return super()._train(MegatronRank._hardware(self)[0], dtype)

    def _whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        return super()._whole({name: value.cpu() for name, value in mine.items()})
