"""The forecast against every peak that docs/results holds, measured on H200s by benchmarks/train_step.py."""

import json
from pathlib import Path

import pytest

from benchmarks.train_step import QWEN3_8B, Case
from rl360.models.architecture import DecoderConfig
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.memory import Work, forecast_stages

GIB = 2**30
RESULTS = sorted((Path(__file__).parents[3] / "docs" / "results" / "h200-train-step").glob("*.json"))
MEASURED = [
    pytest.param(found, case, id=f"{path.stem}-{case}")
    for path in RESULTS
    for found in [json.loads(path.read_text())]
    for case in found["cases"]
]


def test_there_are_measurements_of_every_layout():
    assert {path.stem for path in RESULTS} >= {
        "one-gpu-16-layers",
        "one-gpu-20-layers",
        "two-gpus-cp2",
        "two-gpus-dp2",
        "two-gpus-tp2",
    }


@pytest.mark.parametrize(("found", "case"), MEASURED)
def test_peak_of_tensors_within_half_a_percent_and_of_the_allocator_within_two(found, case):
    arguments = found["arguments"]
    model = DecoderConfig.from_hf({**QWEN3_8B, "num_hidden_layers": found["layers"]})
    layout = Layout.of(
        int(arguments["num_gpus"]), int(arguments["tensor_parallel"]), context=int(arguments["context_parallel"])
    )
    tokens = sum(Case.of(case).lengths)
    work = Work(
        tokens=tokens,
        chunk=int(arguments["logprob_chunk"]),
        predicting_share=1 - 0.125,
        fp32_logits=found.get("fp32_logits", False),  # measured before there was a choice
    )
    (stage,) = forecast_stages(model, layout, work)
    metrics = found["cases"][case]["metrics"][-1]
    assert stage.allocated / GIB == pytest.approx(metrics["perf/peak_memory_gib_max"], rel=0.005)
    assert stage.total / GIB == pytest.approx(metrics["perf/peak_reserved_gib_max"], rel=0.02)
