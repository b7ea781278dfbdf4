"""What docs/results says of a train step, by hand and from its files; one context rank's part without the others."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.train_step import QWEN3_8B, Case, derived, model_flops
from benchmarks.train_step_ranks import AloneOf, CopiesForExchanges
from rl360.models.decoder import DecoderConfig
from rl360.models.megatron import attention
from rl360.models.megatron.packed import PackedInputs, PackedTensors

RESULTS = sorted((Path(__file__).parents[2] / "docs" / "results" / "h200-train-step").glob("*.json"))
QWEN = DecoderConfig.from_hf(QWEN3_8B)


def test_flops_by_hand():
    """Two sequences of 800 and 80, an eighth prompt: 700 and 70 positions predict."""
    matrices = 36 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    pairs = 800 * 800 / 2 + 80 * 80 / 2
    wanted = 6 * matrices * 880 + 6 * 4096 * 151936 * 770 + 3 * 36 * pairs * 4 * 32 * 128
    assert model_flops(QWEN, (800, 80), 0.125) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_rates_follow_from_their_seconds(path):
    found = json.loads(path.read_text())
    given = {name: int(found["arguments"][name]) for name in ("num_gpus", "tensor_parallel", "context_parallel")}
    given["data_parallel"] = given["num_gpus"] // given["tensor_parallel"] // given["context_parallel"]
    given["one_of_context"] = int(found["arguments"].get("one_of_context", 1))
    args = argparse.Namespace(**given, pipeline_parallel=1, prompt_share=0.125)
    shape = DecoderConfig.from_hf({**found.get("model", QWEN3_8B), "num_hidden_layers": found["layers"]})
    for name, figures in found["cases"].items():
        for key, value in derived(shape, args, Case.of(name), figures, found["roofline_ms"].get(name)).items():
            assert figures[key] == pytest.approx(value, rel=1e-9), (name, key)


def test_one_of_context_counts_its_part_and_sees_as_many_pairs_as_any_other():
    args = argparse.Namespace(num_gpus=1, data_parallel=1, pipeline_parallel=1, one_of_context=1, prompt_share=0.125)
    case, figures = Case.of("131072x1"), {"step_s": 2.0, "metrics": []}
    whole = derived(QWEN, args, case, figures, {"total": 1000.0, "sustained_total": 1200.0})
    assert (whole["share_of_roofline"], whole["share_of_sustained_roofline"]) == (0.5, 0.6)
    part = derived(QWEN, argparse.Namespace(**{**vars(args), "one_of_context": 4}), case, figures, {"total": 250.0})
    assert part["mfu"] == pytest.approx(whole["mfu"] / 4)
    assert part["tokens_per_s"] == pytest.approx(131072 / 4 / 2.0)
    assert part["share_of_roofline"] == 0.125  # what is measured is a part's already
    ids = np.zeros(64, np.int64)
    pairs = []
    for rank in range(4):
        spans = PackedInputs.of(ids, np.arange(64), [64], 4, rank).spans
        pairs.append(sum(span.key_stop - q for span in spans for q in range(span.query_stop - span.query_start)))
    assert set(pairs) == {64 * 65 // 2 // 4}


def test_copies_stand_for_ranks_that_hold_the_same(monkeypatch):
    """Against attention over a stream laid out by hand, with its gradients summed back by hand."""
    monkeypatch.setattr(attention, "distributed", CopiesForExchanges)
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    inputs = PackedInputs.of(np.zeros(18, np.int64), np.arange(18), [11, 7], 3, 2)
    packed = PackedTensors.of(inputs, torch.device("cpu"))
    found = attention.attend(q, k, v, packed, AloneOf(3))
    # Chunks of three tokens, 0 1 2 by the ranks' first halves, then 3 4 5 by their second ones, last rank first.
    stream = [torch.cat([x[:3]] * 3 + [x[3:]] * 3) for x in (k, v)]
    wanted = []
    for row, place in enumerate([6, 7, 8, 9, 10, 11]):  # the last rank has chunks 2 and 3
        start = 0 if place < 11 else 11
        keys, values = (x[start : place + 1].repeat_interleave(2, dim=1) for x in stream)
        scores = torch.einsum("hd,khd->hk", q[row], keys) / 2.0
        wanted.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    wanted = torch.stack(wanted)
    torch.testing.assert_close(found, wanted)
    toward = torch.randn_like(found)
    for mine, own in zip(*(torch.autograd.grad(out, (q, k, v), toward) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, own)
