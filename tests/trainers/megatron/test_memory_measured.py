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


def test_what_there_are_measurements_of():
    assert {path.stem for path in RESULTS} >= {
        "one-gpu-16-layers",
        "one-gpu-20-layers",
        "one-gpu-20-layers-te",
        "one-gpu-8-layers-recompute",
        "one-gpu-k2-4-layers",
        "one-of-four-context-ranks",
        "two-gpus-cp2",
        "two-gpus-dp2",
        "two-gpus-tp2",
    }


@pytest.mark.parametrize(("found", "case"), MEASURED)
def test_peak_of_tensors_within_one_percent_and_of_the_allocator_within_two(found, case):
    arguments = found["arguments"]
    model = DecoderConfig.from_hf({**found.get("model", QWEN3_8B), "num_hidden_layers": found["layers"]})
    alone = int(arguments.get("one_of_context", 1))  # of so many context ranks only this one was there
    ranks = {"tensor": int(arguments["tensor_parallel"]), "context": int(arguments["context_parallel"]) * alone}
    layout = Layout.of(int(arguments["num_gpus"]) * alone, **ranks)
    work = Work(
        tokens=sum(Case.of(case).lengths),
        chunk=int(arguments["logprob_chunk"]),
        recompute=arguments["recompute"],
        predicting_share=1 - 0.125,
        fp32_logits=found.get("fp32_logits", False),  # measured before there was a choice
        transformer_engine=arguments.get("transformer_engine") == "True",
    )
    (stage,) = forecast_stages(model, layout, work)
    # Alone, a rank has the whole optimizer, and no communicators.
    more = (alone - 1) * stage.static["optimizer"]
    outside = 0 if alone == 1 else stage.outside["NCCL"]
    metrics = found["cases"][case]["metrics"][-1]
    assert (stage.allocated + more) / GIB == pytest.approx(metrics["perf/peak_memory_gib_max"], rel=0.01)
    assert (stage.total + more - outside) / GIB == pytest.approx(metrics["perf/peak_reserved_gib_max"], rel=0.02)
