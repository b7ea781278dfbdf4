"""Random weights: the same for both trainers, and for a large model drawn on its GPU."""

import logging

import pytest
import torch

from rl360.models import loading, random_weights
from rl360.models.decoder import Decoder
from tests.models.megatron.test_hf_weights import Stage, config_of

SHAPES = {"a": (700, 1024), "b": (3, 5), "c": (300, 1000)}  # the first takes three kernels, the last two


@pytest.mark.parametrize("tied", [True, False])
def test_both_trainers_ask_for_the_same_numbers_on_the_device_of_the_weights(monkeypatch, tied):
    pytest.importorskip("megatron.core")
    from rl360.models.megatron import model
    from rl360.models.megatron.layout import Layout

    asked = []

    def drawn(shapes, std, seed, device):
        asked.append(([(name, tuple(shape)) for name, shape in shapes.items()], std, seed, device.type))
        return iter(())

    monkeypatch.setattr(loading, "drawn", drawn)
    monkeypatch.setattr(model, "drawn", drawn)
    config = config_of(tie_word_embeddings=tied, model_type="qwen3", qk_norm=True)
    with torch.device("meta"):  # no device that any default would name
        decoder, stage = Decoder(config), Stage(config, 1, 0, 2)
    stage.parameters = lambda: iter(stage.by_name.values())
    loading._fill_random(decoder, 5)
    model.fill_random([stage], config, Layout(), 5)
    of_torch, of_megatron = asked
    assert of_torch == of_megatron
    assert of_torch[1:] == (config.initializer_range, 5, "meta")
    assert len(of_torch[0]) == 1 + 2 * 7 + (not tied)  # no norm is drawn


def test_the_host_draws_for_a_gpu_until_it_would_take_long(caplog):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    assert [random_weights.drawing_device(count, cuda) for count in (1, 2**27, 2**27 + 1)] == [cpu, cpu, cuda]
    assert random_weights.drawing_device(2**40, cpu) == cpu
    with caplog.at_level(logging.INFO):
        found = dict(random_weights.drawn({"a": (2, 3), "b": (4,)}, 0.5, 7, cuda))
    assert caplog.messages == ["random weights: 10 numbers drawn on the cpu, seed 7"]
    generator = torch.Generator().manual_seed(7)
    for name, shape in (("a", (2, 3)), ("b", (4,))):
        assert torch.equal(found[name], torch.empty(shape).normal_(0.0, 0.5, generator=generator))


@pytest.mark.gpu
def test_a_decoder_on_a_gpu_has_the_numbers_that_the_gpu_draws(monkeypatch, tmp_path):
    from tests.trainers.helpers import tiny_folder

    folder = tiny_folder(tmp_path / "m")
    monkeypatch.setattr(random_weights, "MAX_DRAWN_ON_HOST", 0)
    decoder = loading.load_decoder(folder, "cuda", random_init_seed=3)
    matrices = {n: p for n, p in decoder.named_parameters() if not n.endswith("norm.weight")}
    shapes = {n: p.shape for n, p in matrices.items()}
    for name, whole in random_weights.drawn(shapes, decoder.config.initializer_range, 3, torch.device("cuda")):
        assert torch.equal(matrices[name], whole), name


@pytest.mark.gpu
def test_a_gpu_draws_a_normal_distribution_and_the_same_every_time(monkeypatch):
    monkeypatch.setattr(random_weights, "MAX_DRAWN_ON_HOST", 0)
    device = torch.device("cuda", 0)
    one, same, other = (dict(random_weights.drawn(SHAPES, 0.02, seed, device)) for seed in (3, 3, 4))
    for name, shape in SHAPES.items():
        assert one[name].shape == shape
        assert one[name].device == device
        assert torch.equal(one[name], same[name]), name
        assert not torch.equal(one[name], other[name]), name
    # Five standard errors; far into the tail; and no kernel repeats what another has drawn.
    numbers = torch.cat([value.flatten() for value in one.values()]).double()
    count = numbers.numel()
    assert abs(numbers.mean()) < 5 * 0.02 / count**0.5
    assert numbers.std().item() == pytest.approx(0.02, rel=5 / (2 * count) ** 0.5)
    assert numbers.float().unique().numel() > 0.9 * count
    assert numbers.abs().max() > 4 * 0.02


@pytest.mark.gpu
def test_a_small_model_is_drawn_as_on_the_host():
    on_gpu, on_host = (dict(random_weights.drawn(SHAPES, 0.02, 3, torch.device(name))) for name in ("cuda", "cpu"))
    assert all(torch.equal(on_gpu[name].cpu(), on_host[name]) for name in SHAPES)
