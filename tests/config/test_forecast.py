import pytest

from rl360.config.forecast import GIB, MIB, ModelShape, forecast
from rl360.config.schemas import TasksConfig

SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
K2_HORIZON = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 250624,
}


def test_parameters_equal_the_published_counts():
    assert ModelShape.from_hf(SMOLLM2).num_parameters == 134_515_008
    assert ModelShape.from_hf(K2_HORIZON).num_parameters == 8_999_178_240


def test_kv_bytes_by_hand():
    # keys and values, 30 layers, 3 heads of 64 values, 4 bytes
    assert ModelShape.from_hf(SMOLLM2).kv_bytes_per_token == 2 * 30 * 3 * 64 * 4


def test_a_missing_key_is_named():
    with pytest.raises(KeyError, match="vocab_size"):
        ModelShape.from_hf({k: v for k, v in SMOLLM2.items() if k != "vocab_size"})


def test_memory_by_hand_for_a_small_shape(typed):
    shape = ModelShape(10, 2, 20, 2, 1, 5, 100, tie_word_embeddings=True)
    # a layer: attention 10*5*2*(2+1)=300, ffn 3*10*20=600, norms 20; two of them, embeddings 1000, last norm 10
    assert shape.num_parameters == 2 * 920 + 1000 + 10
    config = typed(**{"trainer.max_tokens_per_gpu": 8, "rollout.max_context_tokens": 4, "rollout.num_workers": 3})
    memory = forecast(shape, config).memory
    assert memory["weights"] == memory["gradients"] == 2850 * 4
    assert memory["adam"] == 2850 * 8
    assert memory["activations"] == 2 * 8 * 4 * (8 * 10 + 4 * 20)
    assert memory["logits_chunk"] == 2 * 8 * 100 * 4  # the chunk is larger than the micro-batch
    assert memory["trial_workers"] == 3 * 100 * MIB
    assert memory["kv_cache"] == 64 * 4 * 2 * 2 * 1 * 5 * 4  # below the limit of 1 GiB
    assert "reference" not in memory


def test_switches_change_what_they_should(typed):
    shape = ModelShape.from_hf(SMOLLM2)
    plain = forecast(shape, typed())
    with_reference = forecast(shape, typed(**{"algorithm.kl_coef": 0.1}))
    assert with_reference.memory_bytes - plain.memory_bytes == 134_515_008 * 4
    recomputed = forecast(shape, typed(**{"trainer.gradient_checkpointing": True}))
    assert recomputed.memory["activations"] < plain.memory["activations"] / 4
    external = forecast(shape, typed(**{"rollout.engine": "external", "rollout.sync": "disk"}))
    assert "kv_cache" not in external.memory
    assert external.disk["published_weights"] == 2 * 134_515_008 * 4


def test_checkpoints_count_one_more_while_it_is_written(typed):
    shape = ModelShape.from_hf(SMOLLM2)
    disk = forecast(shape, typed(**{"checkpoint.keep_last": 2, "checkpoint.keep_best": False})).disk
    assert disk["checkpoints"] == 3 * 12 * 134_515_008
    kept = {"checkpoint.keep_last": 2, "checkpoint.keep_best": False, "checkpoint.keep_every": 20, "iterations": 70}
    assert forecast(shape, typed(**kept)).disk["checkpoints"] == (3 + 3) * 12 * 134_515_008


def test_a_run_that_writes_no_checkpoint_needs_no_disk_for_one(typed):
    shape = ModelShape.from_hf(SMOLLM2)
    none = {"checkpoint.every": 0, "checkpoint.at_end": False, "checkpoint.hf": False, "checkpoint.keep_every": 1}
    bare = forecast(shape, typed(**none))
    assert bare.disk["checkpoints"] == 0
    assert bare.disk_bytes == bare.disk["trajectories"]
    one = 12 * 134_515_008
    assert forecast(shape, typed(**{"checkpoint.every": 0})).disk["checkpoints"] == 3 * one
    between = none | {"checkpoint.every": 10, "checkpoint.keep_every": 0}
    assert forecast(shape, typed(**between)).disk["checkpoints"] == 3 * one  # also an interrupted run's
    best = none | {"checkpoint.keep_every": 0, "evaluation.every": 5, "evaluation.tasks": TasksConfig(path="held_out")}
    assert forecast(shape, typed(**best)).disk["checkpoints"] == 3 * one
    assert forecast(shape, typed(**best | {"checkpoint.keep_best": False})).disk["checkpoints"] == 0


def test_the_quickstart_model_fits_a_laptop(typed):
    needed = forecast(ModelShape.from_hf(SMOLLM2), typed(**{"rollout.max_context_tokens": 512})).memory_bytes
    assert 3 * GIB < needed < 8 * GIB
