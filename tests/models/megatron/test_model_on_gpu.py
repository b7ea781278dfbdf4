"""Random weights of a large model, which a GPU draws."""

import pytest
import torch

from rl360.models.megatron import model

SHAPES = {"a": (700, 1024), "b": (3, 5), "c": (300, 1000)}  # the first takes three kernels, the last two


@pytest.mark.gpu
def test_a_gpu_draws_a_normal_distribution_and_the_same_every_time(monkeypatch):
    monkeypatch.setattr(model, "MAX_DRAWN_ON_HOST", 0)
    device = torch.device("cuda", 0)
    one, same, other = (dict(model.drawn(SHAPES, 0.02, seed, device)) for seed in (3, 3, 4))
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
    on_gpu, on_host = (dict(model.drawn(SHAPES, 0.02, 3, torch.device(name))) for name in ("cuda", "cpu"))
    assert all(torch.equal(on_gpu[name].cpu(), on_host[name]) for name in SHAPES)
