"""Room for one attempt in the embedded engine, and the device of the trainer that it shares."""

from __future__ import annotations

import pytest

from rl360.config.forecast import ModelShape
from rl360.config.one_process import WIDTH_STEP, one_process_problems

# 2 layers x 2 heads x 16 x 2 (keys, values) x 4 bytes = 512 bytes a token in fp32.
SHAPE = ModelShape.from_hf(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
    }
)
GIB = 2**30
TOKEN_BYTES = 512


def config_with(typed, tokens=1024, room=1024, **changes):
    room_gib = room * TOKEN_BYTES / GIB
    return typed(**{"rollout.max_context_tokens": tokens, "rollout.kv_cache_gib": room_gib, **changes})


def test_one_attempt_fits_exactly(typed):
    assert SHAPE.kv_bytes_per_token == TOKEN_BYTES
    assert not list(one_process_problems(config_with(typed), SHAPE, lambda: 0))


def test_an_attempt_that_the_cache_would_cut_is_named(typed):
    (problem,) = one_process_problems(config_with(typed, room=1023), SHAPE, lambda: 0)
    assert "holds 960 tokens of this model, and one attempt may have 1024" in problem
    assert problem.endswith("expected at least 0.001")


def test_a_gpu_holds_twice_as_many(typed):
    assert not list(one_process_problems(config_with(typed, room=512), SHAPE, lambda: 1))
    on_cpu = config_with(typed, room=512, **{"trainer.device": "cpu"})
    assert len(list(one_process_problems(on_cpu, SHAPE, lambda: 1))) == 1


def test_positions_end_a_turn_too(typed):
    config = config_with(typed, tokens=4097, room=8192, **{"model.max_context_tokens": 8192})
    (problem,) = one_process_problems(config, SHAPE, lambda: 0)
    assert problem.startswith("rollout.max_context_tokens: 4097 is more than the model's 4096 positions")


@pytest.mark.parametrize(("cards", "expected"), [(0, 1), (1, 0)])
def test_a_gpu_that_is_asked_for_is_there(typed, cards, expected):
    found = list(one_process_problems(typed(**{"trainer.device": "cuda"}), None, lambda: cards))
    assert found == ["trainer.device: cuda, and this machine has no CUDA GPU; try auto or cpu"] * expected


def test_servers_have_their_own_room(typed):
    config = config_with(typed, room=1, **{"rollout.engine": "sglang"})
    assert not list(one_process_problems(config, SHAPE, lambda: 0))


def test_the_step_is_the_caches():
    from rl360.gateway.embedded import kv_cache

    assert kv_cache.WIDTH_STEP == WIDTH_STEP
