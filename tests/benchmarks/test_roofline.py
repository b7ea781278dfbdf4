"""Which products a step has and how often, by hand; how long a kernel is timed. The kernels themselves need a GPU."""

import argparse

import pytest

from benchmarks import roofline
from benchmarks.train_step import QWEN3_8B
from rl360.models.decoder import DecoderConfig


def test_products_of_two_sequences_on_one_of_two_tensor_ranks(monkeypatch):
    """6144 and 2048 tokens, an eighth prompt: 7168 predict, 3.5 chunks of 2048. A product of n x m x k takes n units
    here, and three times that under load."""
    sizes = []

    def product_ms(rows, out, inner, device, timer):
        sizes.append((rows, out, inner))
        return float(rows) * (3 if timer is roofline.sustained_ms else 1)

    monkeypatch.setattr(roofline, "product_ms", product_ms)
    args = argparse.Namespace(
        tensor_parallel=2, context_parallel=1, one_of_context=1, prompt_share=0.125, logprob_chunk=2048
    )
    found = roofline.Roofline(DecoderConfig.from_hf(QWEN3_8B), args, rank=0).products((6144, 2048))
    assert set(sizes) == {
        (8192, (16 + 2 * 4) * 128, 4096),
        (8192, 4096, 16 * 128),
        (8192, 2 * 6144, 4096),
        (8192, 4096, 6144),
        (2048, 75968, 4096),
    }
    assert found["qkv"] == found["down"] == 36 * 8192
    assert found["head"] == 2048 * 3.5
    assert found["products"] == 4 * 36 * 8192 + 2048 * 3.5
    assert found["sustained_products"] == 3 * found["products"]


@pytest.mark.parametrize(("one_ms", "numbers"), [(2.0, [1, 250, 250]), (900.0, [1, 2, 2])])
def test_a_kernel_is_timed_under_load_for_half_a_second_behind_half_a_second(monkeypatch, one_ms, numbers):
    asked = []
    monkeypatch.setattr(roofline, "_event_ms", lambda run, number: asked.append(number) or one_ms)
    assert roofline.sustained_ms(lambda: None) == one_ms
    assert asked == numbers
