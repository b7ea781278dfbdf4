"""Which GPUs the run's servers get: those behind the trainer's, the trainer's own when they take turns."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest

from rl360.config.schemas import MegatronTrainerConfig, RootConfig, TorchTrainerConfig
from rl360.engine.engines import own_gpus, require_methods, server_devices, serving_gpus
from rl360.errors import CheckpointError, ConfigError
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


@pytest.mark.parametrize(
    ("visible", "megatron_gpus", "sglang", "expected"),
    [
        ("0,1,2,3,4,5,6,7", 2, {"num_servers": 2, "tensor_parallel_size": 2}, 4),  # two are left idle
        ("0,1,2,3", 4, {"num_servers": 4, "colocated": True}, 0),
        ("0", 0, {}, 0),  # shared with the torch trainer
        ("0,1", 0, {}, 1),
        ("0,1,2", 2, {"devices": [1, 2], "num_servers": 2}, 1),  # one of them trains, too
        ("", 8, {}, 0),
    ],
)
def test_gpus_that_only_serve(visible, megatron_gpus, sglang, expected, monkeypatch):
    made = config(visible, monkeypatch, megatron_gpus, **sglang)
    made.rollout.engine = "sglang"
    assert serving_gpus(made) == expected
    made.rollout.engine = "external"
    assert serving_gpus(made) == 0


class HandsOver:
    """A trainer of a plug-in that can do everything; `made` says what was called."""

    version = 0

    def __init__(self) -> None:
        self.made: list[str] = []

    def start(self) -> None:
        self.made.append("start")
        raise _Told

    step = publish = save = restore = close = offload = onload = trim = start


class NoTrim(HandsOver):
    trim = None  # type: ignore[assignment]


class NoMemory(HandsOver):
    onload = trim = restore = None  # type: ignore[assignment]


class Wraps:
    """Hands everything on to the trainer inside."""

    def __init__(self, inside: object) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> object:
        return getattr(self._inside, name)


@pytest.mark.parametrize(
    ("make", "changes", "problems"),
    [
        (NoTrim, {"colocated": True}, ["colocated: true, and NoTrim has no trim; expected a trainer with offload"]),
        (
            NoMemory,
            {"colocated": True},
            [
                "_target_: NoMemory has no restore; expected a rl360",
                "colocated: true, and NoMemory has no onload, trim;",
            ],
        ),
        (NoTrim, {}, []),  # it has GPUs of its own
        (lambda: Wraps(HandsOver()), {"colocated": True}, []),
        (HandsOver, {"colocated": True}, []),
    ],
)
def test_a_trainer_without_what_the_run_will_call_is_refused_before_it_starts(
    make, changes, problems, monkeypatch, tmp_path
):
    from rl360.engine import build

    made = config("", monkeypatch, **changes)
    made.rollout.engine, made.rollout.sync = "sglang", "ipc"
    trainer = make()
    monkeypatch.setattr(build, "_make", lambda *args, **rest: trainer if "model_dir" in rest else None)
    with ExitStack() as stack, pytest.raises(ConfigError if problems else _Told) as refused:
        stack.enter_context(build.build(made, tmp_path, "run", None))
    if problems:
        assert getattr(trainer, "made", []) == []
        assert len(refused.value.problems) == len(problems)
        assert all(text in said for text, said in zip(problems, refused.value.problems, strict=True))


@pytest.mark.parametrize("trainer", [TorchTrainer, MegatronTrainer])
def test_both_trainers_have_what_a_colocated_run_calls(trainer, monkeypatch):
    made = config("", monkeypatch, colocated=True)
    made.rollout.engine, made.rollout.sync = "sglang", "ipc"
    require_methods(made, trainer.__new__(trainer))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_missing_or_too_much_is_named_before_servers_start(tied, monkeypatch, tmp_path):
    """And before a trainer that shares its GPUs leaves them."""
    from rl360.engine import engines
    from tests.tiny_model import write_tiny_llama
    from tests.weight_sync.kit import StubTrainer

    trainer = StubTrainer(write_tiny_llama(tmp_path / "other", tied=not tied), seed=1)
    trainer.offload = lambda: pytest.fail("left its GPUs")
    made = config("", monkeypatch, colocated=True)
    made.rollout.engine, made.rollout.sync = "sglang", "ipc"
    monkeypatch.setattr(engines.Fleet, "start", lambda self: pytest.fail("started"))
    model = write_tiny_llama(tmp_path / "model", tied=tied)
    problem = f"lm_head.weight not {'in a model' if tied else 'sent'}"
    with ExitStack() as stack:
        fleet = engines.sglang_fleet(made, model, tmp_path, None, stack, [(1, 2)])
        with pytest.raises(CheckpointError, match=f"StubTrainer publishes .*: {problem}"):
            engines.sglang_engines(made, model, tmp_path, None, stack, trainer, fleet)


@pytest.mark.parametrize(("visible", "devices", "said"), [("0", [], 1), ("0", [0], 0), ("0,1", [], 0)])
def test_servers_on_the_trainers_own_gpu_are_warned_of_once(visible, devices, said, monkeypatch, tmp_path, caplog):
    from rl360.engine import build

    made = config(visible, monkeypatch, devices=devices)
    made.model.name, made.paths.models = "m", str(tmp_path)
    made.rollout.engine, made.rollout.sync = "sglang", "ipc"
    with ExitStack() as stack:
        assert build.make_fleet(made, tmp_path, stack) is not None
        own_gpus(made)
    assert sum("share the trainer's" in line for line in caplog.messages) == said


def test_servers_for_weights_that_never_change_start_too(monkeypatch, tmp_path):
    """`rl360 tasks calibrate rollout=sglang`: what stands in for a trainer publishes nothing."""
    from rl360.engine import build, engines
    from rl360.tasks.wiring import _FixedWeights

    made = config("", monkeypatch)
    made.model.name, made.paths.models = "m", str(tmp_path)
    made.rollout.engine = "sglang"
    monkeypatch.setattr(engines.Fleet, "start", lambda self: self.urls())
    with ExitStack() as stack:
        urls, _ = build.make_engines(made, tmp_path, _FixedWeights(None), stack)
    assert len(urls) == 1


@pytest.mark.parametrize(
    ("visible", "trainer", "sglang", "expected"),
    [
        ("", TorchTrainerConfig(), {}, True),
        ("0", TorchTrainerConfig(), {}, False),
        ("0", TorchTrainerConfig(device="cpu"), {}, True),
        ("3,5", TorchTrainerConfig(), {}, True),
        ("3,5", TorchTrainerConfig(), {"devices": [0]}, False),
        ("0,1,2,3", MegatronTrainerConfig(num_gpus=2), {"num_servers": 2}, True),
        ("0,1,2,3", MegatronTrainerConfig(num_gpus=2), {"devices": [1, 2], "num_servers": 2}, False),
        ("0,1,2,3", MegatronTrainerConfig(num_gpus=2), {"devices": [2, 3, 0], "num_servers": 2}, True),
        ("0,1", MegatronTrainerConfig(num_gpus=2), {"colocated": True}, False),
    ],
)
def test_servers_begin_beside_a_trainer_with_whom_they_share_no_gpu(
    visible, trainer, sglang, expected, monkeypatch, tmp_path
):
    from rl360.engine import build, engines

    made = config(visible, monkeypatch, **sglang)
    made.trainer = trainer
    assert own_gpus(made) is expected

    made.model.name, made.paths.models = "m", str(tmp_path)
    made.rollout.engine, made.rollout.sync = "sglang", "ipc"
    happened = []
    monkeypatch.setattr(engines.Fleet, "begin", lambda self: happened.append("begin"))

    class Recorded:
        step = publish = save = restore = offload = onload = trim = close = lambda self: None

        def start(self):
            happened.append("trainer")
            raise _Told

    monkeypatch.setattr(build, "_make", lambda *args, **rest: Recorded() if "model_dir" in rest else None)
    with ExitStack() as stack, pytest.raises(_Told):
        stack.enter_context(build.build(made, tmp_path, "run", None))
    assert happened == (["begin", "trainer"] if expected else ["trainer"])


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
