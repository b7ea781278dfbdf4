"""Layers of Transformer Engine's modules on a CPU: wiring, with stand-ins; names; what is said where it is missing."""

import sys

import pytest
import torch
from torch import distributed

from rl360.errors import ConfigError
from rl360.models.decoder import causal_attend
from rl360.models.loading import load_decoder, read_config
from rl360.models.megatron.hf_weights import hf_tensors, load_hf, named_parameters, parameter_names, parts
from rl360.models.megatron.layout import Layout
from rl360.models.tiny import write_tiny
from tests.models.megatron.te_stand_ins import NAMES
from tests.models.megatron.test_model import LENGTHS, build, packed

FAMILIES = ["llama", "qwen3", "k2_horizon"]


@pytest.fixture(scope="module")
def layout():
    from rl360.models.megatron.parallel import start_parallel, stop_parallel

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    layout = Layout.of(1)
    start_parallel(layout)
    yield layout
    stop_parallel()
    distributed.destroy_process_group()


@pytest.fixture
def stand_ins(monkeypatch):
    from megatron.core.extensions import transformer_engine

    from rl360.models.megatron import te_spec

    for name, cls in NAMES.items():
        assert hasattr(transformer_engine, name)
        monkeypatch.setattr(transformer_engine, name, cls)
    monkeypatch.setattr(te_spec, "require_transformer_engine", lambda: None)


def both(tmp_path, layout, kind, **options):
    """(own layers, Transformer Engine's, config), with the same weights of a tiny folder."""
    folder = write_tiny(tmp_path / kind, kind, seed=3)
    config = read_config(folder)
    chunks = [build(config, layout, **options), build(config, layout, transformer_engine=True, **options)]
    for chunk in chunks:
        load_hf([chunk], config, layout, folder)
    return *chunks, config


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_have_the_names_and_the_files_of_our_own_layers(tmp_path, layout, stand_ins, kind):
    own, engines, config = both(tmp_path, layout, kind)
    fused = {name for name, _ in engines.named_parameters() if name.endswith("layer_norm_weight")}
    assert len(fused) == (0 if config.norm_groups > 1 else 2 * config.num_layers)
    named = dict(named_parameters([engines]))
    assert set(named) == set(parameter_names(config))
    for name, parameter in named_parameters([own]):
        assert torch.equal(named[name], parameter), name
    wanted = dict(hf_tensors([own], config, layout))
    found = dict(hf_tensors([engines], config, layout))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "core_attn", "full"])
def test_hidden_states_and_gradients_are_the_decoders(tmp_path, layout, stand_ins, kind, recompute):
    _, chunk, config = both(tmp_path, layout, kind, recompute=recompute)
    decoder = load_decoder(tmp_path / kind)
    inputs = packed(config.vocab_size)
    found = chunk(inputs).squeeze(1)
    expected = decoder.hidden(inputs.token_ids_L, inputs.positions_L, causal_attend(LENGTHS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    found.backward(grad)
    expected.backward(grad)
    assert_gradients(chunk, config, decoder, lambda parameter: parameter.grad)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_are_added_to_the_buffers_and_each_weight_is_told_of_once(
    tmp_path, layout, stand_ins, kind, recompute
):
    """Two micro-batches; autograd's own gradients stay empty, also where Megatron's mark is on the weights."""
    _, chunk, config = both(tmp_path, layout, kind, recompute=recompute)
    decoder = load_decoder(tmp_path / kind)
    told: dict[str, int] = {}
    for name, parameter in named_parameters([chunk]):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
        parameter.grad_added_to_main_grad = False
        parameter.on_gradient = lambda name=name: told.update({name: told.get(name, 0) + 1})
    inputs = packed(config.vocab_size)
    for _ in range(2):
        found = chunk(inputs).squeeze(1)
        grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        found.backward(grad)
        decoder.hidden(inputs.token_ids_L, inputs.positions_L, causal_attend(LENGTHS)).backward(grad)
    assert all(parameter.grad is None for parameter in chunk.parameters())
    assert_gradients(chunk, config, decoder, lambda parameter: parameter.main_grad.float())
    assert told == dict.fromkeys(set(parameter_names(config)) - {"output_layer.weight"}, 2)


def assert_gradients(chunk, config, decoder, gradient):
    wanted = dict(decoder.named_parameters())
    compared = 0
    for name, parameter in named_parameters([chunk]):
        if name == "output_layer.weight":  # hidden states do not depend on it
            continue
        for part in parts(name, config):
            a = gradient(parameter).narrow(part.axis, part.at, part.length)
            b = wanted[part.hf_name].grad.narrow(part.axis, part.start, part.length)
            assert (a - b).norm() <= 1e-5 * b.norm(), part.hf_name
            compared += 1
    assert compared > 20


def test_context_parallelism_keeps_our_attention(tmp_path, layout, stand_ins):
    from rl360.models.megatron.model import transformer_config
    from rl360.models.megatron.spec import NoModule
    from rl360.models.megatron.te_spec import te_decoder_spec

    config = read_config(write_tiny(tmp_path / "llama", "llama", seed=3))
    for context, expected in ((1, NAMES["TEDotProductAttention"]), (2, NoModule)):
        megatron = transformer_config(config, Layout(context=context), torch.bfloat16, torch.device("cpu"))
        (layer, *_) = te_decoder_spec(megatron, config.norm_groups, None).layer_specs
        assert layer.submodules.self_attention.submodules.core_attention is expected


def test_where_it_is_not_installed_the_error_says_what_to_install(tmp_path, layout, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    config = read_config(write_tiny(tmp_path / "llama", "llama", seed=3))
    with pytest.raises(ConfigError, match=r"trainer\.transformer_engine: true.*pip install --no-build-isolation"):
        build(config, layout, transformer_engine=True)


def test_one_that_cannot_be_loaded_is_named_with_its_reason(tmp_path, layout, monkeypatch):
    package = tmp_path / "packages" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    config = read_config(write_tiny(tmp_path / "llama", "llama", seed=3))
    with pytest.raises(ConfigError, match=r"cannot be imported \(libcudnn\.so\.9: cannot open"):
        build(config, layout, transformer_engine=True)
