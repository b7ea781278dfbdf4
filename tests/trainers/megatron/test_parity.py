"""Every layout of four ranks gives the torch trainer's gradient, metrics and weights, and transformers' logprobs."""

import numpy as np
import pytest
import torch

from rl360.algorithms.grpo import GRPO
from rl360.models.megatron.hf_weights import parts
from rl360.trainers.megatron.shards import shard_batch
from rl360.trainers.optim import Optimizer, decay_groups
from rl360.trainers.torch_trainer import TorchTrainer
from tests.trainers.helpers import batch_of, random_batch, sequence, tiny_folder

FAMILIES = {
    "llama": {"num_hidden_layers": 4},  # tied
    "qwen3": {"num_hidden_layers": 4, "model_type": "qwen3", "tie_word_embeddings": False},
    "k2_horizon": {
        "num_hidden_layers": 4,
        "model_type": "k2_horizon",
        "layernorm_num_groups": 4,
        "tie_word_embeddings": False,
    },
}
LAYOUTS = {
    "dp4": {},
    "tp2-dp2": {"tensor": 2},
    "tp2-dp2-no-sp": {"tensor": 2, "sequence_parallel": False},
    "cp2-dp2": {"context": 2},
    "cp4": {"context": 4},
    "pp2-dp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "pp2-vpp2-dp2": {"pipeline": 2, "virtual_pipeline": 2},
    "tp2-cp2": {"tensor": 2, "context": 2},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "cp2-pp2": {"context": 2, "pipeline": 2},
    "tp2-pp2-vpp2": {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
}
# What a family adds: a tied head in a pipeline and over tensor ranks, a grouped norm wherever gradients are summed.
BY_DEFAULT = [("qwen3", layout) for layout in LAYOUTS]
BY_DEFAULT += [("llama", layout) for layout in ("tp2-dp2", "pp2-vpp2-dp2", "tp2-pp2")]
BY_DEFAULT += [("k2_horizon", layout) for layout in ("tp2-dp2", "cp2-pp2")]
CASES = [
    pytest.param(family, layout, marks=() if (family, layout) in BY_DEFAULT else pytest.mark.slow)
    for family in FAMILIES
    for layout in LAYOUTS
]
# Every term of the objective at work: clip, correction, KL.
FULL = {"kl_coef": 0.1, "importance_cap": 1.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return {name: tiny_folder(base / name, **changes) for name, changes in FAMILIES.items()}


def torch_step(folder, algorithm, batches, **changes):
    """(gradient of the first batch, metrics of each, weights after the last) of the torch trainer."""
    settings = {"learning_rate": 1e-2, "num_threads": 1, "device": "cpu"} | changes
    trainer = TorchTrainer(**settings, model_dir=folder, random_init_seed=3, algorithm=algorithm)
    trainer.start()
    gradient = {}
    step = Optimizer.step

    def capture(optimizer):
        if not gradient:
            gradient.update({name: p.grad.clone() for name, p in trainer.decoder.named_parameters()})
        return step(optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", capture)
        metrics = [trainer.step(batch).metrics for batch in batches]
    return gradient, metrics, {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}


@pytest.fixture(scope="module")
def expected(folders):
    """By family, of the batch `random_batch(1)`."""
    return {name: torch_step(folder, GRPO(**FULL), [random_batch(1)]) for name, folder in folders.items()}


def assert_near(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= tolerance * value.norm(), name


def assert_same_metrics(found, wanted, tolerance=1e-5):
    names = {name for name in wanted if not name.startswith(("time/", "perf/"))}
    assert names == {name for name in found if not name.startswith(("time/", "perf/"))}
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=tolerance, abs=1e-6), name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_gradient_metrics_and_step_are_those_of_one_process(ranks, folders, expected, family, layout):
    gradient, (metrics,), weights = expected[family]
    trainer = ranks.again(layout=LAYOUTS[layout], model_dir=folders[family], algorithm=GRPO(**FULL))
    assert_near(ranks.gradients(random_batch(1)), gradient, 1e-5)
    assert_same_metrics(trainer.step(random_batch(1)).metrics, metrics)
    # Adam's first step is the gradient's sign: elements whose gradient is rounding noise may go either way.
    assert_near(ranks.weights(), weights, 1e-3)


@pytest.mark.parametrize("recompute", ["full", "core_attn"])
@pytest.mark.parametrize("layout", ["cp2-dp2", "tp2-pp2-vpp2"])
def test_recomputation_changes_nothing(ranks, folders, expected, recompute, layout):
    ranks.again(layout=LAYOUTS[layout], model_dir=folders["qwen3"], algorithm=GRPO(**FULL), recompute=recompute)
    assert_near(ranks.gradients(random_batch(1)), expected["qwen3"][0], 1e-5)


@pytest.mark.parametrize("max_tokens", [8, 24, 10_000])
def test_the_split_into_micro_batches_changes_nothing(ranks, folders, expected, max_tokens):
    ranks.again(layout=LAYOUTS["tp2-cp2"], model_dir=folders["llama"], algorithm=GRPO(**FULL), max_tokens=max_tokens)
    assert_near(ranks.gradients(random_batch(1)), expected["llama"][0], 1e-5)


@pytest.mark.parametrize("layout", ["dp4", "cp2-dp2", "pp2-vpp2-dp2"])
def test_ranks_of_unequal_work_and_ranks_of_none(ranks, folders, layout):
    """One long and one short sequence: of four data ranks two have nothing but a filler."""
    rows = [
        sequence(list(range(3, 60)), list(range(5, 30)), weight=0.6 / 25, advantage=1.0, group="a"),
        sequence([4, 9, 7], [11, 12], weight=0.2, advantage=-0.5, group="b", temperature=0.7),
    ]
    batch = batch_of(rows)
    gradient, (metrics,), _ = torch_step(folders["qwen3"], GRPO(), [batch])
    trainer = ranks.again(layout=LAYOUTS[layout], model_dir=folders["qwen3"], algorithm=GRPO())
    assert_near(ranks.gradients(batch), gradient, 1e-5)
    assert_same_metrics(trainer.step(batch).metrics, metrics)


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [("cp2-pp2", False), ("cp2-pp2", True), ("tp2-dp2", False), ("tp2-dp2", True), ("pp2-vpp2-dp2", True)],
)
def test_several_updates_of_a_batch_and_several_batches(ranks, folders, layout, overlap):
    """Proximal and reference passes through the same layout, clipping, warm-up, moments."""
    algorithm = GRPO(updates_per_batch=3, **FULL)
    settings = {"learning_rate": 1e-3, "warmup_steps": 4, "max_grad_norm": 0.5}
    batches = [random_batch(seed) for seed in (5, 6)]
    _, metrics, weights = torch_step(folders["qwen3"], algorithm, batches, **settings)
    trainer = ranks.again(
        layout=LAYOUTS[layout],
        model_dir=folders["qwen3"],
        algorithm=algorithm,
        overlap_grad_reduce=overlap,
        **settings,
    )
    if layout == "tp2-dp2" and overlap:  # bucket by bucket, during the backward pass from the second step on
        assert min(trainer._call_all("num_buckets")) > 3
    for batch, wanted in zip(batches, metrics, strict=True):
        assert_same_metrics(trainer.step(batch).metrics, wanted, 1e-3)
    assert metrics[1]["train/grad_norm"] > 0.5
    assert_near(ranks.weights(), weights, 1e-3)


@pytest.mark.parametrize("layout", ["cp4", "tp2-pp2"])
def test_weights_of_whole_sequences_that_lie_on_several_ranks(ranks, folders, layout):
    algorithm = GRPO(importance_level="sequence", importance_cap=3.0)
    gradient, (metrics,), _ = torch_step(folders["qwen3"], algorithm, [random_batch(1)])
    trainer = ranks.again(layout=LAYOUTS[layout], model_dir=folders["qwen3"], algorithm=algorithm)
    assert_same_metrics(trainer.step(random_batch(1)).metrics, metrics)
    ranks.again(layout=LAYOUTS[layout], model_dir=folders["qwen3"], algorithm=algorithm)
    assert_near(ranks.gradients(random_batch(1)), gradient, 1e-5)


def test_parameter_groups_are_the_torch_trainers(ranks, folders):
    from rl360.models.loading import load_decoder, read_config

    folder = folders["qwen3"]
    config = read_config(folder)
    decayed, plain = decay_groups(load_decoder(folder, random_init_seed=0).named_parameters())
    wanted = dict.fromkeys(decayed, 0.25) | dict.fromkeys(plain, 0.0)
    trainer = ranks.again(
        layout=LAYOUTS["tp2-pp2"], model_dir=folder, algorithm=GRPO(), weight_decay=0.25, warmup_steps=2
    )
    trainer.step(random_batch(0))
    found = {}
    for of_rank in trainer._call_all("groups"):
        for name, (rate, decay) in of_rank.items():
            assert rate == pytest.approx(0.5e-2)
            for part in parts(name, config):
                assert found.setdefault(part.hf_name, decay) == decay
    assert found == wanted


@pytest.mark.parametrize("layout", ["tp2-cp2", "cp2-pp2"])
def test_logprobs_equal_transformers(ranks, folders, tmp_path, layout):
    """Packed, cut over ranks, at each sequence's temperature, against each sequence alone in transformers."""
    from transformers import AutoModelForCausalLM

    trainer = ranks.again(layout=LAYOUTS[layout], model_dir=folders["qwen3"], algorithm=GRPO())
    batch = random_batch(3)
    (micro,) = shard_batch(batch, data_parallel=1, max_tokens=80, pad_multiple=8)
    found = trainer._call_all("logprobs", micro)[-1]
    model = AutoModelForCausalLM.from_pretrained(trainer.publish(tmp_path / "hf"), dtype=torch.float32).eval()
    wanted = []
    for s in batch.sequences:
        ids = torch.from_numpy(s.token_ids_T.astype(np.int64))
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0] / s.temperature, -1)
        wanted += [float(logp[t - 1, ids[t]]) for t in np.flatnonzero(s.loss_mask_T)]
    assert sorted(np.concatenate(found)) == pytest.approx(sorted(wanted), rel=1e-4, abs=1e-5)


def test_bf16_weights_with_fp32_gradients_and_masters(ranks, folders, expected):
    """In bf16 the gradient points where the fp32 one does, is summed in fp32, and steps fp32 masters."""
    ranks.again(layout=LAYOUTS["tp2-pp2"], model_dir=folders["llama"], algorithm=GRPO(**FULL), dtype=torch.bfloat16)
    found = ranks.gradients(random_batch(1))
    wanted = expected["llama"][0]
    assert {value.dtype for value in found.values()} == {torch.float32}
    for name, value in wanted.items():
        assert torch.cosine_similarity(found[name].flatten(), value.flatten(), dim=0) > 0.93, name
    before = ranks.weights()
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    ranks.trainer.step(random_batch(1))
    assert any(not torch.equal(before[name], value) for name, value in ranks.weights().items())
