"""Ranks of the tests: processes that stay while layouts, models and settings change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl360.algorithms.grpo import GRPO
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.shards import shard_batch
from rl360.trainers.megatron.trainer import MegatronTrainer
from rl360.types import Batch

CPU_RANK = "tests.trainers.megatron.cpu_rank:CpuRank"
START_TIMEOUT_S = 240.0  # importing megatron-core takes long on a busy machine


def make_trainer(folder: Path, **changes: Any) -> MegatronTrainer:
    """A trainer on the CPU with the tests' small budgets, not started."""
    settings: dict[str, Any] = {
        "learning_rate": 1e-2,
        "max_tokens_per_gpu": 40,
        "logprob_chunk_tokens": 7,
        "rank_target": CPU_RANK,
        "model_dir": folder,
        "random_init_seed": 3,
        "algorithm": GRPO(),
        "start_timeout_s": START_TIMEOUT_S,
        "step_timeout_s": 120.0,
        "log_dir": folder.parent / "logs",
    }
    return MegatronTrainer(**settings | changes)


class Ranks:
    """A trainer of `size` ranks that is told to start over for each case."""

    def __init__(self, size: int, folder: Path, **changes: Any):
        self.size = size
        self.trainer = make_trainer(folder, num_gpus=size, **changes)
        self._settings = dict(self.trainer._settings)
        self.trainer.start()

    def again(self, *, max_tokens: int = 40, layout: dict[str, Any] | None = None, **changes: Any) -> MegatronTrainer:
        """The trainer with another layout (sizes of `Layout.of`); other settings of its ranks are as at the start."""
        if self.trainer._workers is None:  # another test's failure has ended them
            self.trainer.start()
        self.trainer.layout = Layout.of(self.size, **(layout or {}))
        self.trainer._max_tokens = max_tokens
        self.trainer.version = 0
        settings = {**self._settings, "dtype": torch.float32, **changes}
        self.trainer._algorithm = settings["algorithm"]
        self.trainer._model_dir = settings["model_dir"]
        self.trainer._call_all("again", {**settings, "layout": self.trainer.layout})
        return self.trainer

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's whole gradient under HF names."""
        trainer = self.trainer
        shards = shard_batch(
            batch,
            data_parallel=trainer.layout.data,
            max_tokens=trainer._max_tokens * trainer.layout.context,
            pad_multiple=trainer._pad_multiple(),
            count_multiple=trainer.layout.micro_batch_multiple,
        )
        of_ranks = [(shards[trainer.layout.place(rank).data],) for rank in range(self.size)]
        return trainer._call("gradients", of_ranks, 120.0)[0]

    def weights(self) -> dict[str, Tensor]:
        return self.trainer._call_all("weights")[0]

    def close(self) -> None:
        self.trainer.close()
