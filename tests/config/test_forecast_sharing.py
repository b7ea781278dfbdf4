"""Servers and a trainer on one card: the phases by hand, the host's memory, and that what is advised fits."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl360.config import files
from rl360.config.compose import Request, compose
from rl360.config.files import look
from rl360.config.forecast import GIB, MIB, forecast
from rl360.config.forecast_sharing import PHASE_BOTH, PHASE_LOAD, PHASE_ROLLOUT, PHASE_STEPS, advice, serving_forecast
from rl360.config.forecast_trainer import host_bytes, trainer_on_gpu
from rl360.config.gpu_memory import Setup
from rl360.config.schemas import MegatronTrainerConfig, TorchTrainerConfig
from rl360.config.serving_machine import look_at_servers, with_servers
from rl360.diagnostics.machine import Gpu
from rl360.errors import ConfigError
from tests.config.test_forecast_engine import H200, QWEN3_8B, SMOLLM2

COLOCATED = {"rollout.sglang.colocated": True, "rollout.sync": "ipc"}


@pytest.fixture
def sglang(typed):
    """An experiment with servers; trainer: Megatron's numbers, or None for torch on its GPU."""

    def make(trainer=None, **changes):
        config = typed(
            **{"rollout.engine": "sglang", "rollout.sync": "disk", "rollout.max_context_tokens": 8192, **changes}
        )
        config.trainer = TorchTrainerConfig() if trainer is None else MegatronTrainerConfig(**trainer)
        return config

    return make


def test_taking_turns_by_hand(sglang):
    """SmolLM2-135M: a trainer of one GPU and a server, which have nearly all of it in turns."""
    config = sglang({"num_gpus": 1, "max_tokens_per_gpu": 8192}, **COLOCATED)
    found = serving_forecast(config, SMOLLM2, H200)
    (stage,) = Setup.of(config, SMOLLM2).stages()
    assert [phase.name for phase in found.phases] == [PHASE_STEPS, PHASE_LOAD, PHASE_ROLLOUT]
    # context, NCCL, buffers, 256 rows of graphs at 2 MiB, and the graphs' fp32 copy of the output matrix
    paused = (600 + 92 + 200 + 512) * MIB + 4 * 49152 * 576
    assert found.engine.paused == paused
    assert found.phase(PHASE_STEPS).needed == stage.total + paused
    weights = 2 * 134_515_008 + 70 * MIB
    # What the step took is given back: weights, gradients, masters and moments stay, and three buckets of a GiB come.
    resident = 18 * 134_515_008 + sum(stage.outside.values()) + 64 * MIB
    assert found.phase(PHASE_LOAD).needed == resident + 3 * GIB + paused + weights
    left = sum(stage.outside.values()) + 64 * MIB + 64 * MIB
    assert found.phase(PHASE_ROLLOUT).needed == left + found.engine.total
    assert found.engine.free == H200 - left - (600 + 92) * MIB
    assert found.fits
    assert found.problems() == [] == found.warnings()


def test_without_turns_both_are_there_at_once(sglang):
    """The server starts beside weights, masters and gradients; Adam's moments come later."""
    found = serving_forecast(sglang(**{"rollout.sglang.devices": [0]}), SMOLLM2, H200)
    trainer = found.trainer
    assert trainer is not None
    assert trainer.resident - trainer.at_start == 8 * 134_515_008
    assert found.engine.free == H200 - trainer.at_start - (600 + 92) * MIB
    (both,) = found.phases
    assert both.name == PHASE_BOTH
    assert both.needed == trainer.peak + found.engine.total
    own_gpu = serving_forecast(sglang(), SMOLLM2, H200)
    assert own_gpu.trainer is None
    assert [phase.name for phase in own_gpu.phases] == [PHASE_ROLLOUT]
    only_one_card = serving_forecast(sglang(), SMOLLM2, H200, num_cards=1)
    assert only_one_card.trainer is not None


def test_too_much_at_once_says_to_take_turns(sglang):
    one = sglang({"num_gpus": 8, "max_tokens_per_gpu": 8192}, **{"rollout.sglang.devices": [0]})
    found = serving_forecast(one, QWEN3_8B, H200)
    (problem,) = found.problems()
    assert "in the phase 'trainer and engine'" in problem
    assert "try rollout.sglang.mem_fraction_static=" in problem
    assert "rollout.sglang.colocated=true rollout.sync=ipc (" in problem


def test_a_fraction_below_the_weights_names_the_least_that_holds(sglang):
    small = sglang(**{"rollout.sglang.mem_fraction_static": 0.1, "rollout.concurrency": 8})
    found = serving_forecast(small, QWEN3_8B, H200)
    (problem,) = found.problems()
    # 15.3 GiB of weights and eight caches of 8,192 tokens, 1.125 GiB each, of 139.1 GiB
    assert problem.startswith(
        "rollout.sglang.mem_fraction_static: 0.1 of 139.1 GiB on a GPU of 139.8 GiB is less than a server's weights "
        "(15.3 GiB a GPU): it would not start; try rollout.sglang.mem_fraction_static=0.18 ("
    )
    assert serving_forecast(sglang(**{"rollout.sglang.mem_fraction_static": 0.18}), QWEN3_8B, H200).engine.contexts >= 8


def test_a_cache_below_one_request_is_a_problem_and_below_concurrency_a_warning(sglang):
    less = sglang(**{"rollout.sglang.mem_fraction_static": 0.115})
    (problem,) = serving_forecast(less, QWEN3_8B, H200).problems()
    assert "less than one request of rollout.max_context_tokens 8,192" in problem
    some = serving_forecast(sglang(**{"rollout.sglang.mem_fraction_static": 0.3}), QWEN3_8B, H200)
    assert some.problems() == []
    (warning,) = some.warnings()
    held = some.engine.tokens // 8192
    assert 1 < held < 64
    assert warning.startswith("rollout.concurrency: a server decodes up to 64 attempts at once")
    assert f"try rollout.sglang.mem_fraction_static=0.63, rollout.concurrency={held}, " in warning
    assert serving_forecast(sglang(**{"rollout.sglang.mem_fraction_static": 0.63}), QWEN3_8B, H200).warnings() == []


def test_host_memory_of_a_trainer_that_left_by_hand(sglang):
    """Qwen3-8B on one GPU: weights in bf16, masters and two moments in fp32, nothing else."""
    config = sglang({"num_gpus": 1}, **COLOCATED)
    assert host_bytes(config, QWEN3_8B) == 14 * 8_190_735_360
    found = serving_forecast(config, QWEN3_8B, H200)
    assert found.host["offloaded_trainer"] == 14 * 8_190_735_360
    assert found.lines()[-1] == "host memory: servers 5.5 GiB, offloaded_trainer 106.8 GiB"
    # tensor 2, data 2: weights on all four, masters and moments half as large and split in two
    spread = sglang({"num_gpus": 4, "tensor_parallel_size": 2}, **COLOCATED)
    stage = Setup.of(spread, QWEN3_8B).stages()[0].num_parameters
    assert host_bytes(spread, QWEN3_8B) == 4 * (2 * stage + 12 * stage // 2)


def test_the_fullest_of_the_shared_stages_counts(sglang):
    two = {"num_gpus": 4, "pipeline_parallel_size": 2, "max_tokens_per_gpu": 8192}
    config = sglang(two, **COLOCATED, **{"rollout.sglang.devices": [2]})
    first, last = Setup.of(config, QWEN3_8B).stages()
    assert trainer_on_gpu(config, QWEN3_8B, [2]).peak == last.total
    assert trainer_on_gpu(config, QWEN3_8B, [0, 3]).peak == max(first.total, last.total)
    assert trainer_on_gpu(config, QWEN3_8B, [4, 5]) is None


def test_servers_that_open_memory_elsewhere_keep_a_context_there(sglang):
    four = sglang({"num_gpus": 4}, **COLOCATED, **{"rollout.sglang.num_servers": 4})
    one = sglang({"num_gpus": 4}, **COLOCATED)
    more = serving_forecast(four, SMOLLM2, H200).phase(PHASE_STEPS).needed
    assert more - serving_forecast(one, SMOLLM2, H200).phase(PHASE_STEPS).needed == 3 * 500 * MIB


def test_the_machine_holds_servers_and_no_weights_of_a_trainer_on_a_gpu(sglang):
    config = sglang(**COLOCATED)
    servers = serving_forecast(config, SMOLLM2, H200)
    memory = with_servers(forecast(SMOLLM2, config), servers).memory
    assert not {"weights", "gradients", "adam", "activations"} & set(memory)
    assert memory["servers"] == 4 * GIB + 1536 * MIB
    assert memory["offloaded_trainer"] == 14 * 134_515_008
    on_cpu = sglang()
    on_cpu.trainer.device = "cpu"
    assert "weights" in with_servers(forecast(SMOLLM2, on_cpu), serving_forecast(on_cpu, SMOLLM2, H200)).memory


@pytest.mark.parametrize(
    ("ranks", "changes", "num_cards", "text"),
    [
        (4, {"num_servers": 5}, 8, "5 servers of tensor_parallel_size 1 need 5 GPUs, the trainer takes 4, and this"),
        (1, {"tensor_parallel_size": 8}, 4, "1 server of tensor_parallel_size 8 needs 8 GPUs, this machine has 4;"),
        (1, {}, 0, "1 server of tensor_parallel_size 1 needs 1 GPU, this machine has none; try a cluster"),
        (1, {"devices": [1, 9]}, 8, "rollout.sglang.devices: 9, and this machine has 8 GPUs, from 0 to 7"),
    ],
)
def test_cards_that_are_missing_are_said(sglang, ranks, changes, num_cards, text):
    config = sglang({"num_gpus": ranks}, **{f"rollout.sglang.{key}": value for key, value in changes.items()})
    (problem,) = look_at_servers(config, None, None, num_cards).problems
    assert text in problem


def test_cards_that_suffice(sglang):
    assert look_at_servers(sglang({"num_gpus": 4}, **{"rollout.sglang.num_servers": 4}), None, None, 8).problems == []
    assert look_at_servers(sglang({"num_gpus": 4}, **COLOCATED), None, None, 4).problems == []
    assert look_at_servers(sglang({"num_gpus": 64}), None, None, None).problems == []
    shared = look_at_servers(sglang(), None, None, 1)
    assert shared.problems == []
    assert "they share GPUs and keep all their memory" in shared.warnings[0]


@pytest.mark.parametrize(
    ("device", "num_cards", "text"),
    [
        (
            "auto",
            1,
            "so two ranks of one group would share a GPU, which rollout.sync=nccl cannot; expected ipc or disk",
        ),
        ("cpu", 1, "rollout.sync: nccl, and this machine has 1 GPU of which the trainer uses none"),
        ("cpu", 8, "rollout.sync: nccl, and this machine has 8 GPUs of which the trainer uses none"),
        ("auto", 2, None),
    ],
)
def test_nccl_needs_a_gpu_on_each_side(sglang, device, num_cards, text):
    """The first was a warning, and the run then ended on it; the second failed in the first sync."""
    config = sglang(**{"rollout.sync": "nccl"})
    config.trainer.device = device
    found = look_at_servers(config, None, None, num_cards).problems
    assert [text in problem for problem in found] == [True] * (text is not None)


def test_what_sglang_would_not_start_with(sglang):
    uneven = look_at_servers(sglang(**{"rollout.sglang.tensor_parallel_size": 2}), SMOLLM2, H200, None)
    assert any("3 key/value heads: neither divides the other" in problem for problem in uneven.problems)
    long = look_at_servers(sglang(**{"rollout.max_context_tokens": 8193}), SMOLLM2, H200, None)
    assert long.problems == [
        "rollout.max_context_tokens: 8193 is more than the model's 8192 positions (max_position_embeddings), and "
        "SGLang does not start then; expected at most that"
    ]
    unknown = look_at_servers(sglang(**{"rollout.sglang.mem_fraction_static": 0.1}), QWEN3_8B, None, None)
    assert unknown.problems == []
    assert "a GPU of assumed 80.0 GiB (cluster.gpu_memory_gib says it)" in unknown.warnings[0]


def test_check_has_the_servers_beside_the_trainer(sglang, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "gpus", lambda: [Gpu("H200", 143771, "580")] * 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = sglang({"num_gpus": 2, "tensor_parallel_size": 2, "max_tokens_per_gpu": 8192}, **COLOCATED)
    config.model.name = "qwen3_8b"
    config.model.expect = dict(compose(Request(("model=qwen3_8b",))).values["model"]["expect"])
    config.paths.models = config.paths.cache = config.paths.outputs = str(tmp_path)
    found = look(config)
    assert found.servers is not None
    assert found.servers.capacity == (143771 - 616) * MIB
    assert found.servers.phase(PHASE_STEPS).parts["trainer"] == found.gpu.needed
    assert not [problem for problem in found.problems if "sglang" in problem], found.problems
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [
        p for p in look(config).problems if p.startswith("rollout.sglang: 1 server")
    ] == []  # one GPU is enough for it
    config.rollout.sglang.num_servers = 2
    assert [p for p in look(config).problems if p.startswith("rollout.sglang: 2 servers")]


def changed(config, text):
    """The config after one suggestion, read as a user would."""
    config = copy.deepcopy(config)
    for override in text.rpartition(" (")[0].split():
        key, _, value = override.partition("=")
        *groups, name = key.split(".")
        node = config
        for group in groups:
            node = getattr(node, group)
        kind = {field.name: field.type for field in dataclasses.fields(node)}[name]
        parsed = (
            value == "true"
            if kind == "bool"
            else value
            if kind == "str"
            else float(value)
            if "float" in kind
            else int(value)
        )
        setattr(node, name, parsed)
    return config


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    gpus=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2]),
    servers=st.sampled_from([1, 2]),
    fraction=st.none() | st.sampled_from([0.1, 0.3, 0.6, 0.9, 0.95]),
    colocated=st.booleans(),
    capacity_gib=st.sampled_from([40.0, 79.2, 139.8]),
    context=st.sampled_from([4096, 32768]),
    recompute=st.sampled_from(["none", "full"]),
)
def test_what_is_advised_fits(sglang, gpus, tensor, servers, fraction, colocated, capacity_gib, context, recompute):
    if gpus % tensor or servers > gpus:
        return
    changes = {"rollout.sglang.num_servers": servers, "rollout.sglang.mem_fraction_static": fraction}
    changes |= {
        "rollout.max_context_tokens": context,
        "rollout.sglang.devices": [] if colocated else list(range(servers)),
    }
    changes |= COLOCATED if colocated else {}
    trainer = {"num_gpus": gpus, "tensor_parallel_size": tensor, "max_tokens_per_gpu": 8192, "recompute": recompute}
    config = sglang(trainer, **changes)
    found = serving_forecast(config, QWEN3_8B, int(capacity_gib * GIB))
    assert found.fits == (not found.problems())
    if found.fits:
        return
    message = " ".join(found.problems())
    for text in advice(found):
        tried = serving_forecast(changed(config, text), QWEN3_8B, int(capacity_gib * GIB))
        assert tried.fits, text
        assert text in message
    assert advice(found) or "no knob or pair of them is enough" in message


def test_a_layout_that_does_not_fit_the_model_is_refused(sglang):
    with pytest.raises(ConfigError, match="9 attention heads"):
        serving_forecast(sglang({"num_gpus": 2, "tensor_parallel_size": 2}, **COLOCATED), SMOLLM2, H200)
