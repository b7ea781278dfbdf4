"""The forecast of a GPU: parameter counts and bytes by hand, and activations against what real layers save."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.config.forecast import GIB, ModelShape
from rl360.models.architecture import DecoderConfig
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.memory import (
    CUBLAS_BYTES,
    CUDA_CONTEXT_BYTES,
    NCCL_GROUP_BYTES,
    Tokens,
    Work,
    chunk_keeps,
    forecast_stages,
    fullest_stage,
    in_flight,
    layer_keeps,
    stage_parameters,
)

K2_HORIZON = ModelShape(4096, 36, 12288, 32, 8, 128, 250624, tie_word_embeddings=False, norm_groups=4)
QWEN3_8B = ModelShape(4096, 36, 12288, 32, 8, 128, 151936, tie_word_embeddings=False, qk_norm=True)
# hidden 8, 2 layers, ffn 12, 4 heads and 2 key/value heads of 4, vocabulary 100 (padded to 128 a tensor rank)
TINY = ModelShape(8, 2, 12, 4, 2, 4, 100, tie_word_embeddings=False)

DECODER = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_positions": 512,
    "tie_word_embeddings": False,
}
FAMILIES = ({}, {"model_type": "qwen3", "qk_norm": True}, {"model_type": "k2_horizon", "norm_groups": 4})
LAYOUTS = (  # of four ranks
    {"tensor": 2, "data": 2, "sequence_parallel": True},
    {"tensor": 2, "data": 2},
    {"context": 2, "data": 2},
    {"tensor": 2, "context": 2, "sequence_parallel": True},
    {"pipeline": 2, "data": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence_parallel": True},
    {"pipeline": 4},
)


def test_parameters_are_the_published_counts():
    assert stage_parameters(QWEN3_8B, Layout(), 0) == QWEN3_8B.num_parameters == 8_190_735_360
    assert stage_parameters(K2_HORIZON, Layout(), 0) == K2_HORIZON.num_parameters == 8_999_178_240
    # Two tensor ranks hold every matrix once, and every norm twice: 2 x 4096 in each of 36 layers, and the last.
    assert 2 * stage_parameters(K2_HORIZON, Layout(tensor=2), 0) == 8_999_178_240 + 36 * 2 * 4096 + 4096
    # Four pad the vocabulary to a multiple of 512: 250,880, 256 rows more in the embedding and in the head.
    padded = 8_999_178_240 + 2 * 256 * 4096 + 3 * (36 * 2 * 4096 + 4096)
    assert 4 * stage_parameters(K2_HORIZON, Layout(tensor=4), 0) == padded


def test_stages_have_the_embedding_first_and_the_head_last():
    # A layer: q 8 x 16, k and v 8 x 8 each, out 16 x 8, gate, up and down 8 x 12 each, two norms of 8.
    layer = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 12 + 2 * 8
    layout = Layout(pipeline=2)
    assert stage_parameters(TINY, layout, 0) == layer + 128 * 8
    assert stage_parameters(TINY, layout, 1) == layer + 128 * 8 + 8
    tied = replace(TINY, tie_word_embeddings=True)
    assert stage_parameters(tied, Layout(), 0) == 2 * layer + 128 * 8 + 8
    assert stage_parameters(tied, layout, 1) == layer + 128 * 8 + 8  # the last stage has a copy of its own


def test_a_layer_by_hand():
    keeps = layer_keeps(TINY, Layout(), Tokens.of(Layout(), 10))
    assert keeps == {
        "residual stream": 2 * (2 * 8 * 10),  # before the attention and before the MLP, bf16
        "1 / rms": 2 * (4 * 10),
        "q": 2 * 16 * 10,
        "k, v": 2 * (2 * 8 * 10),
        "attention output": 2 * 16 * 10,
        "log-sum-exp": 4 * 4 * 10,
        "gate, up": 2 * (2 * 12 * 10),
    }
    assert layer_keeps(TINY, Layout(), Tokens.of(Layout(), 10), "full") == {"residual stream": 2 * 8 * 10}
    engines = layer_keeps(TINY, Layout(), Tokens.of(Layout(), 10), transformer_engine=True)
    assert engines == keeps | {"normalised inputs": 2 * (2 * 8 * 10), "activated input": 2 * 12 * 10}


def test_what_each_axis_divides():
    whole = layer_keeps(TINY, Layout(), Tokens.of(Layout(), 16))
    split = Layout(tensor=2, sequence_parallel=True)
    halves = layer_keeps(TINY, split, Tokens.of(split, 16))
    assert all(2 * halves[name] == count for name, count in whole.items())
    alone = Layout(tensor=2)
    without = layer_keeps(TINY, alone, Tokens.of(alone, 16))
    assert {name for name in whole if without[name] == whole[name]} == {"residual stream", "1 / rms"}
    context = Layout(context=2)
    shared = layer_keeps(TINY, context, Tokens.of(context, 16))
    # All keys and values are gathered; outputs are kept by the attention, a chunk each, and joined by the product.
    assert {name for name in whole if shared[name] == whole[name]} == {"k, v", "attention output"}
    again = layer_keeps(TINY, context, Tokens.of(context, 16), "core_attn")
    assert (2 * again["k, v"], 2 * again["attention output"]) == (whole["k, v"], whole["attention output"])
    assert "log-sum-exp" not in again


def test_a_gpu_by_hand():
    layout, work = Layout(data=2), Work(tokens=10, chunk=4)
    (stage,) = forecast_stages(TINY, layout, work)
    count = stage_parameters(TINY, layout, 0)
    assert stage.static == {"weights": 2 * count, "gradients": 4 * count, "optimizer": 12 * count // 2}
    layer = 320 + 80 + 320 + 320 + 320 + 160 + 480
    activations = 2 * layer + 4 * 4 * 10 + (2 * 8 + 4) * 10  # angles; the last norm's input and 1 / rms
    # Backward of SwiGLU: four times its width in bf16, and two gradients of the residual stream.
    backward = {"activations": activations, "one layer's backward": 4 * 2 * 12 * 10 + 2 * (2 * 8 * 10)}
    # Hidden states, those that predict (all) and their gradient; 4 + 1 rows of logits, 128 columns, in fp32, and of
    # their gradient in bf16.
    head = {"activations": activations, "head": 3 * (2 * 8 * 10) + (4 + 2) * 5 * 128}
    assert stage.moments["backward pass of the last layer"] == {**backward, "cuBLAS": CUBLAS_BYTES}
    assert stage.moments["head"] == {**head, "cuBLAS": CUBLAS_BYTES}
    (rounded,) = forecast_stages(TINY, layout, replace(work, fp32_logits=False))  # the gradient overwrites them
    assert rounded.moments["head"]["head"] == 3 * (2 * 8 * 10) + 2 * 5 * 128
    assert stage.fullest == "head"
    assert stage.allocated == sum(stage.static.values()) + sum(head.values()) + CUBLAS_BYTES
    # Communicators: data, data with context, and all ranks.
    assert stage.outside == {"CUDA": CUDA_CONTEXT_BYTES, "NCCL": 3 * NCCL_GROUP_BYTES}
    assert sum(stage.parts.values()) == stage.total


def test_micro_batches_in_flight():
    assert [in_flight(Layout(pipeline=4), rank) for rank in range(4)] == [4, 3, 2, 1]
    # Interleaved: 2 (p - r - 1) + (v - 1) p warm up, one more runs.
    assert [in_flight(Layout(pipeline=2, virtual_pipeline=2), rank) for rank in range(2)] == [5, 3]
    assert in_flight(Layout(), 0) == 1


def test_k2_horizon_at_128k_on_64_gpus():
    layout = Layout.of(64, tensor=2, context=4, model=K2_HORIZON)
    assert layout.data == 8
    needed = {
        name: fullest_stage(K2_HORIZON, layout, Work(131072, 1024, name)) for name in ("none", "core_attn", "full")
    }
    plain = needed["none"]
    assert plain.num_parameters == 4_499_738_624
    assert plain.static["optimizer"] == 12 * (4_499_738_624 // 32)
    # A token of a layer, bytes: 2 x 4096 of the residual stream / 2, q 4096, k and v of 4 x as many tokens 8192,
    # outputs twice 8192, log-sum-exp 64, gate and up 24576, and 16 for the norms.
    assert sum(layer_keeps(K2_HORIZON, layout, Tokens.of(layout, 131072)).values()) == 32768 * 53_328
    assert [round(stage.total / GIB) for stage in needed.values()] == [92, 80, 37]


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 3, 6]),
    data=st.integers(1, 4),
    recompute=st.sampled_from(["none", "core_attn", "full"]),
    tokens=st.sampled_from([4096, 32768]),
)
def test_more_gpus_and_more_recomputing_never_need_more(tensor, context, pipeline, data, recompute, tokens):
    layout = Layout(tensor, pipeline, None, context, data, tensor > 1)
    work = Work(tokens, 1024, recompute)
    stages = forecast_stages(K2_HORIZON, layout, work)
    assert all(count >= 0 for stage in stages for count in stage.parts.values())
    for more in (replace(layout, data=2 * data), replace(layout, context=2 * context)):
        assert fullest_stage(K2_HORIZON, more, work).allocated <= fullest_stage(K2_HORIZON, layout, work).allocated
    if recompute == "none":
        full = fullest_stage(K2_HORIZON, layout, replace(work, recompute="full"))
        if K2_HORIZON.num_layers // pipeline > 2:  # one layer at a time is recomputed beside the inputs of all
            assert full.allocated < fullest_stage(K2_HORIZON, layout, work).allocated


def count(folder, layouts, families, world):
    """Every case with what each rank counted; see memory_ranks.py."""
    cases = [
        {"model": {**DECODER, **family}, "layout": layout, "tokens": 48, "recompute": recompute}
        for layout in layouts
        for family in families
        for recompute in ("none", "core_attn", "full")
    ]
    arguments = (str(world), f"file://{folder / 'meet'}", json.dumps(cases), str(folder / "out"))
    command = (sys.executable, "-W", "ignore", "-m", "tests.trainers.megatron.memory_ranks")
    ranks = [
        subprocess.Popen((*command, str(rank), *arguments), stderr=subprocess.PIPE, text=True) for rank in range(world)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, errors
    found = [json.loads((folder / f"out.{rank}").read_text()) for rank in range(world)]
    return [(case, [of_rank[i] for of_rank in found]) for i, case in enumerate(cases)]


def assert_as_forecast(counted):
    """To the byte, on every rank; and Megatron's schedule warms up as `in_flight` says."""
    assert counted
    for case, ranks in counted:
        layout, model = Layout(**case["layout"]), DecoderConfig(**case["model"])
        tokens = Tokens.of(layout, case["tokens"])
        for rank, found in enumerate(ranks):
            stage = layout.place(rank).pipeline
            lasts = [stage == layout.pipeline - 1 and chunk == layout.chunks - 1 for chunk in range(layout.chunks)]
            expected = sum(chunk_keeps(model, layout, tokens, case["recompute"], last) for last in lasts)
            assert (found["bytes"], found["warm_up"] + 1) == (expected, in_flight(layout, stage)), (case, rank)


def test_activations_are_what_real_layers_save(tmp_path):
    assert_as_forecast(count(tmp_path, [{}], FAMILIES, world=1))


@pytest.mark.slow
def test_activations_are_what_real_layers_save_on_every_axis(tmp_path):
    assert_as_forecast(count(tmp_path, LAYOUTS, FAMILIES[1:2], world=4))
