"""Whether a layout fits its GPUs: the table, the message, and that what it advises does fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.config import files
from rl360.config.compose import Request, compose
from rl360.config.files import look
from rl360.config.forecast import GIB, ModelShape, forecast
from rl360.config.gpu_memory import GpuForecast, Setup, advice, gpu_forecast
from rl360.config.schemas import MegatronTrainerConfig
from rl360.diagnostics.machine import Gpu
from rl360.errors import ConfigError
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.memory import fullest_stage

K2_HORIZON = ModelShape(4096, 36, 12288, 32, 8, 128, 250624, tie_word_embeddings=False, norm_groups=4)
H200_GIB, H100_GIB = 139.8, 79.6


@pytest.fixture
def k2(typed):
    """The reference's training side: K2 Horizon 7B at 128K, 64 GPUs, tensor 2, context 4."""

    def make(**changes):
        config = typed(**{"rollout.max_context_tokens": 131072})
        numbers = {"num_gpus": 64, "tensor_parallel_size": 2, "context_parallel_size": 4, "max_tokens_per_gpu": 32768}
        config.trainer = MegatronTrainerConfig(**{**numbers, **changes})
        return config

    return make


def test_k2_horizon_fits_an_h200_and_not_an_h100(k2):
    on_h200 = gpu_forecast(k2(), K2_HORIZON, int(H200_GIB * GIB))
    assert on_h200.message() is None
    assert on_h200.lines() == [
        "64 GPUs: tensor 2 with sequence, context 4, pipeline 1, data 8; micro-batches of 131,072 tokens, 32,768 a "
        "GPU; recompute none",
        "stage     parameters  weights  gradients  optimizer  activations  passing  other  needed  of GiB  "
        "                     fullest at",
        "    0  4,499,738,624      8.4       16.8        1.6         58.7      2.0    4.3    91.7   139.8  "
        "backward pass of the last layer",
    ]
    on_h100 = gpu_forecast(k2(), K2_HORIZON, int(H100_GIB * GIB))
    assert on_h100.message() == (
        "trainer: 91.7 GiB forecast on a GPU at the backward pass of the last layer, a GPU has 79.6 GiB; try "
        "trainer.recompute=full (37.1 GiB), trainer.context_parallel_size=8 trainer.max_tokens_per_gpu=16384 (65.0 "
        "GiB), trainer.tensor_parallel_size=4 (47.7 GiB), trainer.pipeline_parallel_size=4 (75.6 GiB)"
    )


def test_nearly_full_is_said(k2):
    close = gpu_forecast(k2(), K2_HORIZON, int(95 * GIB))
    assert close.fits
    assert close.message() == (
        "trainer: 91.7 GiB forecast on a GPU, a GPU has 95.0 GiB: nearer to the limit than the forecast is "
        "sure of (10%)"
    )
    assumed = gpu_forecast(k2(), K2_HORIZON, None)
    assert "80.0 GiB is assumed of a GPU (cluster.gpu_memory_gib says it)" in assumed.message()
    assert "of GiB, assumed" in assumed.lines()[1]


def test_without_sequence_parallelism_the_advice_is_for_a_layout_without(k2):
    """Each value is the forecast of a run with exactly those overrides; and the key itself is a knob."""
    without = {"sequence_parallel": False, "context_parallel_size": 2, "max_tokens_per_gpu": 65536}

    def needed(**changes):
        return gpu_forecast(k2(**{**without, **changes}), K2_HORIZON, None).needed

    capacity = needed(sequence_parallel=True)
    message = gpu_forecast(k2(**without), K2_HORIZON, capacity).message()
    assert f"trainer.sequence_parallel=true ({capacity / GIB:.1f} GiB)" in message
    assert f"trainer.tensor_parallel_size=4 ({needed(tensor_parallel_size=4) / GIB:.1f} GiB)" in message
    assert needed(tensor_parallel_size=4) > 1.1 * needed(tensor_parallel_size=4, sequence_parallel=True)


def test_each_stage_has_a_row(k2):
    lines = gpu_forecast(k2(pipeline_parallel_size=4), K2_HORIZON, int(H200_GIB * GIB)).lines()
    assert len(lines) == 2 + 4
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "3"]


def test_a_layout_that_does_not_divide_the_model_is_refused(k2):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 16 does not divide the model's 8 key/value heads"):
        gpu_forecast(k2(tensor_parallel_size=16, context_parallel_size=1), K2_HORIZON, None)


def test_a_long_attempt_decides_over_the_budget(k2):
    assert Setup.of(k2(max_tokens_per_gpu=1024), K2_HORIZON).tokens == 131072
    assert Setup.of(k2(max_tokens_per_gpu=65536), K2_HORIZON).tokens == 4 * 65536
    assert Setup.of(k2(max_tokens_per_gpu=32769), K2_HORIZON).tokens == 4 * 32769 + 12  # a multiple of 2 x 4 x 2


def test_a_reference_model_is_a_second_set_of_weights(k2, typed):
    config = k2()
    config.algorithm.kl_coef = 0.1
    with_reference = gpu_forecast(config, K2_HORIZON, None)
    assert with_reference.needed - gpu_forecast(k2(), K2_HORIZON, None).needed == 2 * 4_499_738_624


def overridden(setup: Setup, text: str) -> Setup:
    """The setup after the overrides of one suggestion, read as a user would."""
    names = {"tensor_parallel_size": "tensor", "context_parallel_size": "context", "pipeline_parallel_size": "pipeline"}
    layout, num_gpus = setup.layout, setup.layout.world_size
    axes = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline}
    sequence_parallel = setup.sequence_parallel
    for override in text.split():
        key, _, value = override.removeprefix("trainer.").partition("=")
        if key in names:
            axes[names[key]] = int(value)
        elif key == "num_gpus":
            num_gpus = int(value)
        elif key == "recompute":
            setup = replace(setup, recompute=value)
        elif key == "sequence_parallel":
            sequence_parallel = {"true": True, "false": False}[value]
        elif key == "max_tokens_per_gpu":
            setup = replace(setup, tokens_per_gpu=int(value))
        else:
            assert key == "logprob_chunk_tokens"
            setup = replace(setup, chunk=int(value))
    layout = Layout.of(num_gpus, **axes, sequence_parallel=sequence_parallel, model=setup.model)
    return replace(setup, layout=layout)


@given(
    tensor=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 4]),
    longest=st.sampled_from([8192, 32768, 131072]),
    budget=st.sampled_from([8192, 16384, 40000]),
    capacity_gib=st.sampled_from([40.0, 79.6, 139.8]),
    chunk=st.sampled_from([512, 8192]),
    sequence=st.booleans(),
)
def test_what_is_advised_fits(tensor, context, data, longest, budget, capacity_gib, chunk, sequence):
    layout = Layout(tensor, 1, None, context, data, sequence and tensor > 1)
    setup = Setup(K2_HORIZON, layout, budget, longest, chunk, "none", True, False, sequence_parallel=sequence)
    capacity = int(capacity_gib * GIB)
    found = GpuForecast(setup, tuple(setup.stages()), capacity, assumed=False)
    if found.fits:
        return
    suggestions = advice(setup, capacity)
    for text, needed in suggestions:
        changed = overridden(setup, text)
        assert changed.tokens >= longest
        assert fullest_stage(changed.model, changed.layout, changed.work).total == needed <= capacity, text
    message = found.message()
    assert all(text in message for text, _ in suggestions)
    assert suggestions or "more GPUs are needed" in message


def test_the_host_holds_ranks_and_the_copy_of_a_checkpoint(k2):
    found = forecast(K2_HORIZON, k2(num_gpus=8, async_checkpoint=True))
    assert found.memory["ranks"] == 8 * 4 * GIB
    assert found.memory["checkpoint_copy"] == 14 * 8_999_178_240  # bf16 weights, fp32 masters and two moments
    assert "weights" not in found.memory
    assert found.disk["hf_checkpoint"] == 2 * 8_999_178_240
    assert "checkpoint_copy" not in forecast(K2_HORIZON, k2(async_checkpoint=False)).memory


@pytest.fixture
def looked(k2, monkeypatch, tmp_path):
    """What the checks of this machine find for K2 Horizon on as many cards as given."""

    def make(cards, expect=None, **changes):
        monkeypatch.setattr(files, "gpus", lambda: [Gpu("H200", 143771, "580")] * cards)
        config = k2(**{"num_gpus": 8, **changes})
        expected = compose(Request(("model=k2_horizon_7b",))).values["model"]["expect"]
        config.model.name, config.model.expect = "k2_horizon_7b", {**expected, **(expect or {})}
        config.paths.models = config.paths.cache = config.paths.outputs = str(tmp_path)
        return look(config)

    return make


def test_cards_that_are_missing_are_said(looked):
    problems = [p for p in looked(0).problems if p.startswith("trainer.num_gpus")]
    assert problems == [
        "trainer.num_gpus: 8, and this machine has no CUDA GPUs; Megatron's ranks need one each; try trainer=torch "
        "or a cluster"
    ]
    assert "this machine has 1 CUDA GPU;" in "\n".join(looked(1).problems)
    assert not [p for p in looked(8).problems if p.startswith("trainer")]
    assert not [p for p in looked(0, rank_target="tests.x:Rank").problems if p.startswith("trainer.num_gpus")]


def test_the_forecast_needs_no_weights_and_reads_the_cards_memory(looked):
    found = looked(8)
    assert found.gpu.capacity == (143771 - 616) * 2**20  # the driver keeps some
    assert not found.gpu.assumed
    (stage,) = found.gpu.stages
    assert stage.num_parameters == 4_499_738_624
    too_much = looked(8, max_tokens_per_gpu=131072).problems
    assert any(p.startswith("trainer: ") and "trainer.max_tokens_per_gpu=" in p for p in too_much), too_much


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({"hidden_size": 5}, "model.expect: its shapes give 10,"),
        ({"num_hidden_layers": -1}, "model.expect: num_hidden_layers is -1; expected a whole number"),
        ({"num_attention_heads": 0, "head_dim": None}, "model.expect: num_attention_heads is missing"),
        ({"vocab_size": "many"}, 'model.expect: vocab_size is "many"; expected a whole number'),
    ],
)
def test_a_models_yaml_that_cannot_be_true_gives_no_forecast(looked, expect, said):
    """Where there is no folder to compare it with, a slip of the pen made a forecast of 0.0 GiB of weights, or less."""
    found = looked(8, expect)
    assert [problem for problem in found.problems if problem.startswith(said)]
    assert found.gpu is None
