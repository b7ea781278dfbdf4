"""Megatron chunks of one process against transformers and against the decoder: fp32, packed sequences."""

import logging

import numpy as np
import pytest
import torch
from torch import distributed

from rl360.errors import ConfigError
from rl360.models.decoder import DecoderConfig, causal_attend
from rl360.models.loading import load_decoder, read_config
from rl360.models.megatron.hf_weights import load_hf, named_parameters, parts
from rl360.models.megatron.layout import Layout
from rl360.models.megatron.packed import PackedInputs, PackedTensors
from rl360.models.tiny import write_tiny

LENGTHS = [7, 1, 12]


@pytest.fixture(scope="module")
def layout():
    from rl360.models.megatron.parallel import start_parallel, stop_parallel

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    layout = Layout.of(1)
    start_parallel(layout)
    yield layout
    stop_parallel()
    distributed.destroy_process_group()


def packed(vocab):
    ids = np.random.default_rng(0).integers(3, vocab, sum(LENGTHS))
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    return PackedTensors.of(PackedInputs.of(ids, positions, LENGTHS), torch.device("cpu"))


def build(config, layout, **options):
    from rl360.models.megatron.model import build_model

    (chunk,) = build_model(config, layout, params_dtype=torch.float32, **options)
    return chunk


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {})])
def test_logits_equal_transformers(hf_folder, layout, kind, changes):
    folder, model = hf_folder(kind, **changes)
    config = read_config(folder)
    chunk = build(config, layout)
    load_hf([chunk], config, layout, folder)
    inputs = packed(config.vocab_size)
    hidden = chunk(inputs).squeeze(1)
    logits = (hidden @ chunk.output_weight.T)[:, : config.vocab_size]
    for ids, found in zip(inputs.token_ids_L.split(LENGTHS), logits.split(LENGTHS), strict=True):
        torch.testing.assert_close(found, model(ids[None]).logits[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "k2_horizon"])
@pytest.mark.parametrize("recompute", ["none", "core_attn", "full"])
def test_hidden_states_and_gradients_equal_the_decoders(tmp_path, layout, kind, recompute):
    folder = write_tiny(tmp_path / kind, kind, seed=3)
    config = read_config(folder)
    decoder = load_decoder(folder)
    chunk = build(config, layout, recompute=recompute)
    load_hf([chunk], config, layout, folder)
    inputs = packed(config.vocab_size)
    found = chunk(inputs).squeeze(1)
    expected = decoder.hidden(inputs.token_ids_L, inputs.positions_L, causal_attend(LENGTHS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    found.backward(grad)
    expected.backward(grad)
    wanted = dict(decoder.named_parameters())
    compared = 0
    for name, parameter in named_parameters([chunk]):
        if parameter.grad is None:  # a head of its own, which has no part in hidden states
            assert name == "output_layer.weight"
            continue
        for part in parts(name, config):
            a = parameter.grad.narrow(part.axis, part.at, part.length)
            b = wanted[part.hf_name].grad.narrow(part.axis, part.start, part.length)
            assert (a - b).norm() <= 1e-5 * b.norm(), part.hf_name
            compared += 1
    assert compared > 20


def test_random_weights_are_the_decoders_of_the_same_seed(tmp_path, layout):
    folder = write_tiny(tmp_path / "qwen3", "qwen3", seed=3)
    config = read_config(folder)
    chunk = build(config, layout, random_init_seed=5)
    wanted = dict(load_decoder(folder, random_init_seed=5).named_parameters())
    for name, parameter in named_parameters([chunk]):
        for part in parts(name, config):
            found = parameter.narrow(part.axis, part.at, part.length)
            assert torch.equal(found, wanted[part.hf_name].narrow(part.axis, part.start, part.length)), name
    assert not chunk.output_weight[config.vocab_size :].any()


def test_a_layout_or_a_recompute_that_does_not_fit_is_refused_before_anything_is_built(layout):
    from rl360.models.megatron.model import build_model

    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 97,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
        }
    )
    with pytest.raises(ConfigError) as caught:
        build_model(config, Layout(tensor=2, pipeline=2), params_dtype=torch.float32, recompute="some")
    assert len(caught.value.problems) == 4  # heads, key/value heads, layers, recompute


def test_building_leaves_megatrons_logging_as_it_was(tmp_path, layout):
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    before = logger.level
    build(read_config(write_tiny(tmp_path / "llama", "llama", seed=3)), layout)
    assert logger.level == before
