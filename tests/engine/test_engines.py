"""Which GPUs the run's servers get: those behind the trainer's, the trainer's own when they take turns."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest

from rl360.config.schemas import MegatronTrainerConfig, RootConfig, TorchTrainerConfig
from rl360.engine.engines import server_devices
from rl360.errors import ConfigError
from rl360.trainers.megatron.trainer import MegatronTrainer
from rl360.trainers.torch_trainer import TorchTrainer


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
        ("4,6,7", 1, {"devices": [2, 0]}, ["7", "4"]),  # numbers are those of CUDA, as everywhere in the config
        ("", 1, {"devices": [1]}, ["1"]),  # no GPU here
    ],
)
def test_devices(visible, megatron_gpus, sglang, expected, monkeypatch):
    assert server_devices(config(visible, monkeypatch, megatron_gpus, **sglang)) == expected


def test_a_number_beyond_what_is_visible_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"devices: 2; this process sees 2 GPUs \(6, 7\)"):
        server_devices(config("6,7", monkeypatch, 1, devices=[0, 2]))


def test_no_group_spans_a_gpu_twice(monkeypatch):
    shared = config("0", monkeypatch)
    shared.rollout.sync = "nccl"
    with pytest.raises(ConfigError, match=r"nccl, and the trainer takes 1 of 1 GPUs.*cannot share a GPU; try ipc"):
        server_devices(shared)


def test_megatron_ranks_share_with_nobody(monkeypatch):
    with pytest.raises(ConfigError, match=r"takes 2 of 3 GPUs, and 2 are needed.*colocated"):
        server_devices(config("0,1,2", monkeypatch, 2, num_servers=2))


class _Told(Exception):
    """Raised instead of starting something, with what it was told."""


@pytest.mark.parametrize("fp32_logits", [True, False])
@pytest.mark.parametrize("side", ["trainer", "embedded", "sglang"])
def test_one_key_tells_trainer_and_engines_how_to_compute_final_logits(side, fp32_logits, monkeypatch, tmp_path):
    from rl360.engine import build, engines
    from rl360.gateway.embedded import engine

    def tell(*args, **kwargs):
        raise _Told(kwargs["fp32_logits"] if side != "sglang" else args[0].fp32_logits)

    made = config("", monkeypatch)
    made.model.name, made.paths.models = "m", str(tmp_path)
    made.model.fp32_logits = fp32_logits
    made.rollout.engine = "sglang" if side == "sglang" else "embedded"
    trainer = SimpleNamespace(decoder=None, version=0)
    monkeypatch.setattr(engine, "EmbeddedEngine", tell)
    monkeypatch.setattr(engines, "launches", tell)
    with ExitStack() as stack:
        if side == "trainer":
            monkeypatch.setattr(build, "_make", lambda *args, **rest: tell(**rest) if "model_dir" in rest else None)
            start = partial(stack.enter_context, build.build(made, tmp_path, "run", None))
        else:
            start = partial(build.make_engines, made, tmp_path, trainer, stack)
        with pytest.raises(_Told) as told:
            start()
    assert told.value.args == (fp32_logits,)


@pytest.mark.parametrize("trainer", [TorchTrainer, MegatronTrainer])
def test_both_trainers_take_the_key(trainer):
    assert "fp32_logits" in inspect.signature(trainer).parameters  # else build would leave it out
