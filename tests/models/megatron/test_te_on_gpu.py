"""Layers of Transformer Engine's modules on GPUs, in bf16, beside our own layers and the fp32 of both.

What bf16 does to our own layers is the measure: Transformer Engine's may be off fp32 by little more. Compiling takes
longer than all the rest, and is the same elementwise functions in every family: K2 Horizon, whose grouped norms no
module of theirs fuses, has the most of them left and is compiled too, the trainer's ranks are not.
"""

import pytest
import torch
from torch import distributed

from rl360.algorithms.grpo import GRPO
from rl360.models.loading import read_config
from rl360.models.megatron.hf_weights import hf_tensors, load_hf, named_parameters
from rl360.models.megatron.layout import Layout
from rl360.models.megatron.packed import PackedInputs, PackedTensors
from tests.gpus import needs_gpus
from tests.trainers.helpers import random_batch, tiny_folder
from tests.trainers.megatron.group import Ranks
from tests.trainers.megatron.test_on_gpus import BF16_SHARE, FAMILIES, assert_gradients_near
from tests.trainers.megatron.test_parity import FULL, torch_step

pytestmark = pytest.mark.gpu

RANK = "tests.models.megatron.te_gpu_rank:TeGpuRank"
LENGTHS = [300, 1, 77, 130, 4]  # 512 tokens; several blocks of the attention kernels and a part of one
OTHER_LENGTHS = [5, 250, 64, 1]
TWO = {
    "dp2": {},
    "dp2-overlap": {"overlap_grad_reduce": True},
    "tp2": {"tensor": 2},
    "tp2-no-sp": {"tensor": 2, "sequence_parallel": False},
    "cp2": {"context": 2},
    "pp2": {"pipeline": 2},
}


@pytest.fixture(scope="module", autouse=True)
def transformer_engine():
    pytest.importorskip("transformer_engine.pytorch", reason="no Transformer Engine on this machine")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return {name: tiny_folder(base / name, **changes) for name, changes in FAMILIES.items()}


# ---- one process: hidden states and gradients


@pytest.fixture(scope="module")
def layout():
    from rl360.models.megatron.parallel import start_parallel, stop_parallel

    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    layout = Layout.of(1)
    start_parallel(layout)
    yield layout
    stop_parallel()
    distributed.destroy_process_group()


def make(folder, layout, *, dtype=torch.bfloat16, device="cuda", **options):
    """Weights that bf16 has exactly, gains of their own."""
    from rl360.models.megatron.model import build_model

    config = read_config(folder)
    (chunk,) = build_model(config, layout, params_dtype=dtype, device=device, random_init_seed=3, **options)
    with torch.no_grad():
        for name, parameter in named_parameters([chunk]):
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())
    return chunk


def stream(vocab, lengths, seed, device):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (sum(lengths),), generator=generator).numpy()
    positions = torch.cat([torch.arange(length) for length in lengths]).numpy()
    return PackedTensors.of(PackedInputs.of(ids, positions, lengths), device)


def computed(chunk, vocab):
    """Hidden states of two micro-batches, and what both left in the fp32 buffers."""
    device = next(chunk.parameters()).device
    for parameter in chunk.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False  # as Megatron's buffers set it
    hidden = []
    for seed, lengths in enumerate((LENGTHS, OTHER_LENGTHS)):
        out = chunk(stream(vocab, lengths, seed, device)).squeeze(1)
        toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        out.backward(toward.to(device, out.dtype))
        hidden.append(out.detach().float().cpu())
    assert all(parameter.grad is None for parameter in chunk.parameters())
    gradients = {name: parameter.main_grad.cpu() for name, parameter in named_parameters([chunk])}
    gradients.pop("output_layer.weight", None)  # hidden states do not depend on it
    return torch.cat(hidden), gradients


def share(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("family", "compiled"), [*((family, False) for family in FAMILIES), ("k2_horizon", True)])
def test_hidden_states_and_gradients_are_as_near_to_fp32_as_our_own_layers(folders, layout, family, compiled):
    vocab = read_config(folders[family]).vocab_size
    exact_hidden, exact = computed(make(folders[family], layout, dtype=torch.float32, device="cpu"), vocab)
    own_hidden, own = computed(make(folders[family], layout, compiled=compiled), vocab)
    for recompute in ("none", "core_attn", "full"):
        options = {"compiled": compiled, "transformer_engine": True, "recompute": recompute}
        hidden, gradients = computed(make(folders[family], layout, **options), vocab)
        assert 0 < share(hidden, exact_hidden) <= 1.5 * share(own_hidden, exact_hidden), recompute
        assert gradients.keys() == exact.keys()
        for name, wanted in exact.items():
            # The gradient of a fused norm's gain passes through bf16 (8 bits), ours does not.
            assert share(gradients[name], wanted) <= 2 * share(own[name], wanted) + 5e-3, (recompute, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_exchanged_under_their_hf_names(folders, layout, family):
    config = read_config(folders[family])
    own, engines = (make(folders[family], layout, transformer_engine=on) for on in (False, True))
    wanted = dict(hf_tensors([own], config, layout))
    found = dict(hf_tensors([engines], config, layout))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    modules = {name: type(module).__name__ for name, module in engines.decoder.layers[0].named_modules()}
    grouped = family == "k2_horizon"
    assert modules["self_attention.core_attention"] == "TEDotProductAttention"
    assert modules["mlp.linear_fc2"] == modules["self_attention.linear_proj"] == "TERowParallelLinear"
    expected = "TEColumnParallelLinear" if grouped else "TELayerNormColumnParallelLinear"
    assert modules["mlp.linear_fc1"] == modules["self_attention.linear_qkv"] == expected


def test_weights_come_from_an_hf_folder(folders, layout, tmp_path):
    from safetensors.torch import save_file

    folder = tiny_folder(tmp_path / "llama", **FAMILIES["llama"])
    config = read_config(folder)
    own = make(folder, layout)
    wanted = dict(hf_tensors([own], config, layout))
    save_file({name: value.cpu().contiguous() for name, value in wanted.items()}, str(folder / "model.safetensors"))
    chunk = make(folder, layout, transformer_engine=True)
    for parameter in chunk.parameters():
        parameter.data.zero_()
    load_hf([chunk], config, layout, folder)
    found = dict(hf_tensors([chunk], config, layout))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


# ---- a trainer's ranks: Megatron's buffers, its optimizer, layouts, checkpoints


@pytest.fixture(scope="module", params=[1, 2])
def gpus(request, folders):
    needs_gpus(request.param)
    ranks = Ranks(request.param, folders["llama"], rank_target=RANK)
    yield ranks
    ranks.close()


def again(gpus, folder, changes, **settings):
    changes = dict(changes)
    for name in ("overlap_grad_reduce",):
        if name in changes:
            settings[name] = changes.pop(name)
    settings = {"compile": False, "dtype": torch.bfloat16, "max_tokens": 256, **settings}
    return gpus.again(layout=changes, model_dir=folder, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_batch_is_the_fp32_one_but_for_rounding(gpus, folders, family):
    gradient, (metrics,), _ = torch_step(folders[family], GRPO(**FULL), [random_batch(1)])
    for name, changes in ({"one": {}} if gpus.size == 1 else TWO).items():
        trainer = again(gpus, folders[family], changes, algorithm=GRPO(**FULL), transformer_engine=True)
        assert_gradients_near(gpus.gradients(random_batch(1)), gradient, BF16_SHARE, name)
        found = trainer.step(random_batch(1)).metrics
        for metric in ("train/loss", "train/entropy", "train/grad_norm", "mismatch/kl"):
            assert found[metric] == pytest.approx(metrics[metric], rel=0.03, abs=3e-3), (name, metric)
        assert set(trainer._call_all("optimizers")) == {"torch.optim.adamw.AdamW"}  # ours clips, the installed one not


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_either_kind_of_layers_goes_on_with_the_other(gpus, folders, tmp_path, family):
    """Weights, masters and moments are the saved ones bit for bit; the next step is that of the run that saved."""
    changes = {} if gpus.size == 1 else {"tensor": 2}
    for first in (True, False):
        settings = {"algorithm": GRPO(), "learning_rate": 1e-4, "max_grad_norm": 0.05}
        trainer = again(gpus, folders[family], changes, transformer_engine=first, **settings)
        for seed in range(2):
            trainer.step(random_batch(seed))
        folder = tmp_path / f"saved-{first}"
        trainer.save(folder)
        weights = gpus.weights()
        trainer.step(random_batch(2))
        after = {name: value.float() for name, value in gpus.weights().items()}

        trainer = again(gpus, folders[family], {}, transformer_engine=not first, **settings)  # another layout, too
        trainer.restore(folder)
        found = gpus.weights()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        trainer.step(random_batch(2))
        assert_gradients_near({name: value.float() for name, value in gpus.weights().items()}, after, 5e-3, first)
