"""Which GPUs the run's servers get: those behind the trainer's, the trainer's own when they take turns."""

from __future__ import annotations

import pytest

from rl360.config.schemas import MegatronTrainerConfig, RootConfig, TorchTrainerConfig
from rl360.engine.engines import server_devices
from rl360.errors import ConfigError


def config(visible: str, monkeypatch: pytest.MonkeyPatch, megatron_gpus: int = 0, **sglang: object) -> RootConfig:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    trainer = MegatronTrainerConfig(num_gpus=megatron_gpus) if megatron_gpus else TorchTrainerConfig()
    made = RootConfig(trainer=trainer)
    for key, value in sglang.items():
        setattr(made.rollout.sglang, key, value)
    return made


@pytest.mark.parametrize(
    ("visible", "megatron_gpus", "sglang", "expected"),
    [
        ("4,5,6,7", 2, {"num_servers": 2}, ["6", "7"]),
        ("4,5,6,7", 2, {"num_servers": 2, "colocated": True}, ["4", "5", "6", "7"]),
        ("0,1", 0, {}, ["1"]),  # the torch trainer takes one
        ("0", 0, {}, ["0"]),  # and shares the only one
        ("", 8, {}, []),  # no GPU here: nothing to deal out
        ("0,1,2", 2, {"devices": [1]}, ["1"]),  # as it is said
    ],
)
def test_devices(visible, megatron_gpus, sglang, expected, monkeypatch):
    assert server_devices(config(visible, monkeypatch, megatron_gpus, **sglang)) == expected


def test_no_group_spans_a_gpu_twice(monkeypatch):
    shared = config("0", monkeypatch)
    shared.rollout.sync = "nccl"
    with pytest.raises(ConfigError, match=r"nccl, and the trainer takes 1 of 1 GPUs.*cannot share a GPU; try ipc"):
        server_devices(shared)


def test_megatron_ranks_share_with_nobody(monkeypatch):
    with pytest.raises(ConfigError, match=r"takes 2 of 3 GPUs, and 2 are needed.*colocated"):
        server_devices(config("0,1,2", monkeypatch, 2, num_servers=2))
