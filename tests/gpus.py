"""Which GPU a rank of a test has, and whether there are enough: NCCL 2.31 lets two ranks share one, if told to."""

from __future__ import annotations

import os

import pytest
import torch

from rl360.weight_sync.groups import loaded_nccl


def needs_gpus(ranks: int) -> None:
    """Skips the test where so many ranks of an NCCL group have no place."""
    count = torch.cuda.device_count()
    if count < ranks and not (count and shared()):
        pytest.skip(f"{count} GPUs here, this needs {ranks}, or one that ranks may share (benchmarks/h200/one_gpu.sh)")


def gpu_of(rank: int) -> int:
    return min(rank, torch.cuda.device_count() - 1)


def shared() -> bool:
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and loaded_nccl() >= (2, 31)
