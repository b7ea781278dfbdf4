"""One SGLang server on one GPU: bytes worked by hand for Qwen3-8B and SmolLM2-135M, and what a server's log said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.config.forecast import GIB, MIB, ModelShape
from rl360.config.forecast_engine import (
    Server,
    engine_parameters,
    forecast_engine,
    is_sglang,
    own_fraction,
    tensor_misfits,
)

QWEN3_8B = ModelShape(4096, 36, 12288, 32, 8, 128, 151936, tie_word_embeddings=False, qk_norm=True, max_positions=40960)
SMOLLM2 = ModelShape(576, 30, 1536, 9, 3, 64, 49152, tie_word_embeddings=True, max_positions=8192)
H200 = int(139.8 * GIB)


def test_bytes_of_a_token_by_hand():
    # keys and values x layers x kv heads x width x 2 bytes
    assert Server(QWEN3_8B, 8192, 64).token_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert Server(SMOLLM2, 2048, 64).token_bytes == 2 * 30 * 3 * 64 * 2 == 23_040
    assert Server(QWEN3_8B, 8192, 64, tensor=4).token_bytes == 147_456 // 4
    assert Server(QWEN3_8B, 8192, 64, tensor=16).token_bytes == 147_456 // 8  # a GPU has at least one of the 8 heads
    assert Server(QWEN3_8B, 8192, 64, kv_value_bytes=1).token_bytes == 147_456 // 2


def test_weights_by_hand():
    assert engine_parameters(QWEN3_8B, 1) == 8_190_735_360  # as published: 151936 is a multiple of 64
    assert engine_parameters(SMOLLM2, 1) == 134_515_008
    # tensor 2: a layer's matrices (4096 x 128 x 2 x 40 + 3 x 4096 x 12288) and both embeddings halved, norms whole
    layer = (4096 * 128 * 2 * 40 + 3 * 4096 * 12288) // 2 + 2 * 4096 + 2 * 128
    assert engine_parameters(QWEN3_8B, 2) == 36 * layer + 4096 + 2 * 75968 * 4096
    assert Server(QWEN3_8B, 8192, 64).weight_bytes == 2 * 8_190_735_360
    assert Server(SMOLLM2, 2048, 64, value_bytes=4).weight_bytes == 4 * 134_515_008


def test_a_server_of_an_h200_as_its_log_said():
    """SGLang 0.5.16, SmolLM2-135M, mem_fraction_static 0.3, no graphs, context 2048. The log: 139.13 GiB free, weights
    0.27, 1,930,503 tokens, 20.71 + 20.71 GiB of keys and values, 97.14 GiB left, 4096 requests."""
    found = forecast_engine(Server(SMOLLM2, 2048, 64, mem_fraction=0.3, graph_rows=0), H200)
    assert found.free / GIB == pytest.approx(139.13, abs=0.02)
    assert found.tokens == pytest.approx(1_930_503, rel=0.001)
    assert found.kv_cache / GIB == pytest.approx(41.42, abs=0.05)
    assert found.working["request table"] == 4 * 4097 * 2052
    left = found.free - found.weights - found.kv_cache - found.working["request table"] - found.working["buffers"]
    assert left / GIB == pytest.approx(97.14, abs=0.15)


def test_the_cache_by_hand():
    """Half of what is free, less weights and what lies beside them, in tokens of 147,456 bytes."""
    found = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=0.5), H200)
    assert found.free == H200 - (600 + 92) * MIB
    assert found.tokens == (int(0.5 * found.free) - 2 * 8_190_735_360 - 70 * MIB) // 147_456
    assert found.contexts == found.tokens / 8192
    assert found.slack == found.free - int(0.5 * found.free)
    capped = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=0.5, max_total_tokens=65536), H200)
    assert capped.tokens == 65536


def test_what_others_hold_when_it_starts_counts_by_its_share():
    """mem_fraction_static is of what is free: 40 GiB in other hands cost the cache 0.5 x 40 GiB."""
    alone = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=0.5), H200)
    beside = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=0.5), H200, taken=40 * GIB)
    assert alone.kv_cache - beside.kv_cache == pytest.approx(20 * GIB, abs=2 * 147_456)


def test_sglangs_own_fraction_by_hand():
    # an H200 has 143,771 MiB; 512 + 1.5 x 8192 tokens + 128 a GPU + 2 x 256 rows of a graph
    assert own_fraction(Server(QWEN3_8B, 8192, 64), H200) == round((143771 - 512 - 12288 - 128 - 512) / 143771, 3)
    assert own_fraction(Server(QWEN3_8B, 8192, 64, graph_rows=0), H200) == round((143771 - 12928) / 143771, 3)
    # at least 10 GiB where the card has more than 60
    small = Server(QWEN3_8B, 8192, 64, graph_rows=0, chunked_prefill=2048)
    assert own_fraction(small, H200) == round((143771 - 10240) / 143771, 3)


def test_weights_that_do_not_fit_leave_no_tokens():
    found = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=0.1), H200)
    assert found.tokens == 0  # 13.9 GiB of 139 for weights of 15.3
    enough = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=found.least_fraction), H200)
    assert enough.contexts >= 64
    one_less = forecast_engine(Server(QWEN3_8B, 8192, 64, mem_fraction=found.least_fraction - 0.01), H200)
    assert one_less.contexts < 64


def test_graphs_and_an_fp32_output_matrix_stay_while_it_is_paused():
    copy = 4 * 151936 * 4096
    plain = forecast_engine(Server(QWEN3_8B, 8192, 64, graph_rows=0), H200)
    with_graphs = forecast_engine(Server(QWEN3_8B, 8192, 64, graph_rows=128, fp32_head=True), H200)
    assert plain.paused == (600 + 92 + 200) * MIB
    assert with_graphs.paused - plain.paused == 128 * 2 * MIB + copy
    assert with_graphs.working["prefill"] - plain.working["prefill"] == copy
    # prefill graphs of at most 1024 tokens: 8 + 14 + 8 + 8 sizes of 8 MiB
    short = replace(with_graphs.server, prefill_graphs=True, context_tokens=1024)
    assert forecast_engine(short, H200).working["CUDA graphs"] == (256 + 8 * 38) * MIB + copy


def test_what_a_model_splits_into():
    assert tensor_misfits(QWEN3_8B, 8) == tensor_misfits(QWEN3_8B, 16) == tensor_misfits(SMOLLM2, 3) == []
    assert tensor_misfits(SMOLLM2, 2) == [
        "rollout.sglang.tensor_parallel_size: 2 does not divide the model's 9 attention heads; expected one that does",
        "rollout.sglang.tensor_parallel_size: 2 and the model's 3 key/value heads: neither divides the other",
    ]


def test_flags_of_extra_args_come_last(typed):
    changes = {
        "rollout.engine": "sglang",
        "rollout.concurrency": 100,
        "rollout.sglang.num_servers": 3,
        "rollout.sglang.mem_fraction_static": 0.5,
        "rollout.sglang.extra_args": [
            "--mem-fraction-static=0.7", "--max-total-tokens", "65536", "--kv-cache-dtype", "fp8_e5m2",
            "--cuda-graph-bs-decode", "8", "32", "128", "--sleep-on-idle",
        ],
    }  # fmt: skip
    server = Server.of(typed(**changes), QWEN3_8B)
    assert (server.mem_fraction, server.max_total_tokens, server.kv_value_bytes, server.graph_rows) == (
        0.7,
        65536,
        1,
        128,
    )
    assert server.requests == 34  # 100 attempts over three servers


def test_another_program_is_not_forecast(typed):
    def engine(*command):
        return is_sglang(typed(**{"rollout.engine": "sglang", "rollout.sglang.command": list(command)}))

    assert engine()
    assert engine("python", "-m", "sglang.launch_server")
    assert not engine("python", "-m", "rl360.gateway.embedded.serve")
    assert not is_sglang(typed())


@given(
    model=st.sampled_from([QWEN3_8B, SMOLLM2]),
    tensor=st.sampled_from([1, 2, 3, 4, 8]),
    capacity=st.integers(16 * GIB, 200 * GIB),
    share_taken=st.floats(0, 0.6),
    fraction=st.none() | st.floats(0.05, 0.95),
    context=st.integers(256, 40960),
    requests=st.integers(1, 512),
    rows=st.sampled_from([None, 0, 8, 256]),
)
def test_weights_and_cache_fill_the_fraction_and_never_more(
    model, tensor, capacity, share_taken, fraction, context, requests, rows
):
    """Whatever the flags: weights and cache stay below mem_fraction_static of what is free, by less than one token
    where the cache has any; parts add up; more room never holds fewer tokens; what is paused is a part of the whole."""
    if tensor_misfits(model, tensor):
        return
    server = Server(model, context, requests, tensor, mem_fraction=fraction, graph_rows=rows)
    found = forecast_engine(server, capacity, int(share_taken * capacity))
    static = int(found.fraction * found.free)
    held = found.weights + 70 * MIB + found.kv_cache
    if found.tokens:
        assert static - server.token_bytes < held <= static
        assert found.total == sum(found.outside.values()) + held + sum(found.working.values())
        assert found.free == static + found.slack
    else:
        assert static - found.weights - 70 * MIB < server.token_bytes
    assert found.paused < found.total
    roomier = forecast_engine(replace(server, mem_fraction=found.fraction), capacity + GIB, int(share_taken * capacity))
    assert roomier.tokens >= found.tokens
