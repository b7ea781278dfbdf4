"""The trainer on real GPUs: bf16, the CUDA kernels, NCCL, against the torch trainer's fp32 on the CPU."""

import pytest
import torch

from rl360.algorithms.grpo import GRPO
from rl360.trainers.megatron.trainer import MegatronTrainer
from tests.gpus import needs_gpus
from tests.trainers.helpers import random_batch, tiny_folder
from tests.trainers.megatron.group import Ranks
from tests.trainers.megatron.test_parity import FULL, torch_step

GPU_RANK = "tests.trainers.megatron.gpu_rank:GpuRank"
SHAPE = {  # head width 64: the smallest that every attention kernel has
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}
FAMILIES = {
    "llama": {**SHAPE},
    "qwen3": {**SHAPE, "model_type": "qwen3", "tie_word_embeddings": False},
    "k2_horizon": {
        **SHAPE,
        "model_type": "k2_horizon",
        "layernorm_num_groups": 4,
        "tie_word_embeddings": False,
    },
}
ONE = {"one": {}, "one-recomputed": {"recompute": "full"}, "one-eager": {"compile": False}}
TWO = {
    "dp2": {},
    "tp2": {"tensor": 2},
    "tp2-no-sp": {"tensor": 2, "sequence_parallel": False},
    "cp2": {"context": 2},
    "dp2-overlap": {"overlap_grad_reduce": True},
    "cp2-overlap": {"context": 2, "overlap_grad_reduce": True},
    "pp2": {"pipeline": 2},
    "pp2-vpp2": {"pipeline": 2, "virtual_pipeline": 2},
}
SETTINGS = ("recompute", "compile", "overlap_grad_reduce")
# What bf16 may move a tensor's gradient by, as a share of its norm: products round to 8 bits, the gradients of gains
# are sums in which most cancels.
BF16_SHARE = 0.08


def assert_gradients_near(found, wanted, share, case):
    """Every tensor's difference as a share of its norm; all that are too large are named."""
    assert found.keys() == wanted.keys()
    shares = {name: float((found[name] - value).norm() / value.norm()) for name, value in wanted.items()}
    assert not {name: round(value, 3) for name, value in shares.items() if not value <= share}, case


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return {name: tiny_folder(base / name, **changes) for name, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def expected(folders):
    return {name: torch_step(folder, GRPO(**FULL), [random_batch(1)]) for name, folder in folders.items()}


@pytest.fixture(scope="module", params=[1, 2])
def gpus(request, folders):
    needs_gpus(request.param)
    ranks = Ranks(request.param, folders["llama"], rank_target=GPU_RANK)
    yield ranks
    ranks.close()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_metrics_and_weights_are_the_fp32_ones_but_for_rounding(gpus, folders, expected, family):
    gradient, (metrics,), _ = expected[family]
    for name, changes in (ONE if gpus.size == 1 else TWO).items():
        settings = {key: value for key, value in changes.items() if key in SETTINGS}
        layout = {key: value for key, value in changes.items() if key not in settings}
        trainer = gpus.again(
            layout=layout,
            model_dir=folders[family],
            algorithm=GRPO(**FULL),
            dtype=torch.bfloat16,
            max_tokens=256,
            **settings,
        )
        found = gpus.gradients(random_batch(1))
        assert_gradients_near(found, gradient, BF16_SHARE, name)
        metrics_found = trainer.step(random_batch(1)).metrics
        for metric in ("train/loss", "train/entropy", "train/grad_norm", "mismatch/kl"):
            assert metrics_found[metric] == pytest.approx(metrics[metric], rel=0.03, abs=3e-3), (name, metric)
        assert metrics_found["perf/peak_memory_gib_max"] > 0


@pytest.mark.gpu
def test_layouts_of_two_gpus_step_to_the_same_weights(gpus, folders):
    """Three real steps: what differs is only the order in which bf16 sums were made."""
    reference = None
    for changes in (ONE if gpus.size == 1 else TWO).values():
        settings = {key: value for key, value in changes.items() if key in SETTINGS}
        layout = {key: value for key, value in changes.items() if key not in settings}
        trainer = gpus.again(
            layout=layout,
            model_dir=folders["qwen3"],
            algorithm=GRPO(),
            dtype=torch.bfloat16,
            max_tokens=256,
            learning_rate=1e-4,
            **settings,
        )
        for seed in range(3):
            trainer.step(random_batch(seed))
        weights = {name: value.float() for name, value in gpus.weights().items()}
        reference = reference or weights
        assert_gradients_near(weights, reference, 5e-3, layout)


@pytest.mark.gpu
def test_offload_gives_the_memory_back_and_onload_goes_on(gpus, folders):
    trainer = gpus.again(model_dir=folders["qwen3"], algorithm=GRPO(), dtype=torch.bfloat16, max_tokens=256)
    trainer.step(random_batch(0))
    before = {name: value.clone() for name, value in gpus.weights().items()}
    trainer.trim()
    trainer.offload()
    trainer.onload()
    for name, value in gpus.weights().items():
        assert torch.equal(value, before[name]), name
    assert trainer.step(random_batch(1)).version == 2


@pytest.mark.gpu
def test_published_weights_are_the_ranks_own(gpus, folders, tmp_path):
    from rl360.models.loading import load_decoder

    layout = {} if gpus.size == 1 else {"tensor": 2}
    trainer: MegatronTrainer = gpus.again(
        layout=layout, model_dir=folders["qwen3"], algorithm=GRPO(), dtype=torch.bfloat16, max_tokens=256
    )
    trainer.step(random_batch(0))
    decoder = load_decoder(trainer.publish(tmp_path / "hf"), dtype=torch.bfloat16)
    for name, value in gpus.weights().items():
        assert torch.equal(decoder.get_parameter(name), value), name
