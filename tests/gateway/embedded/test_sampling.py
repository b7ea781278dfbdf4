"""The sampler on numbers worked by hand, and its independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.gateway.embedded.sampling import SamplingParams, _inverse_cdf, sample, uniforms


def params(**changes):
    return SamplingParams.from_json({"sampling_seed": 1, **changes})


def test_inverse_cdf_by_hand():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(6, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
    assert _inverse_cdf(probs, u).tolist() == [0, 0, 2, 2, 3, 3]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([3, 255, 256, 257, 1000]), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_over_blocks_equals_a_plain_one(seed, vocab, u):
    generator = np.random.default_rng(seed)
    probs = generator.random(vocab).astype(np.float32) * (generator.random(vocab) < 0.3)
    probs[generator.integers(vocab)] = 1.0
    got = int(_inverse_cdf(torch.from_numpy(probs.astype(np.float32))[None], torch.tensor([u], dtype=torch.float64)))
    cumulative = np.cumsum(probs.astype(np.float64))
    below = cumulative[got - 1] if got else 0.0
    slack = 1e-5 * cumulative[-1]
    assert probs[got] > 0
    assert below - slack <= u * cumulative[-1] <= cumulative[got] + slack


def test_logprob_is_exact_after_temperature():
    logits = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 0.5]])
    ids, logprobs = sample(logits.clone(), [params(temperature=0.5), params(temperature=0)], [4, 4])
    expected = torch.log_softmax(logits[0] / 0.5, -1)
    assert logprobs[0] == pytest.approx(expected[ids[0]].item(), abs=1e-6)
    assert ids[1] == 1
    assert logprobs[1] == pytest.approx(torch.log_softmax(logits[1], -1)[1].item(), abs=1e-6)


def test_frequencies_follow_the_distribution():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])).expand(4000, 4).clone()
    ids, _ = sample(logits, [params(sampling_seed=3)] * 4000, list(range(4000)))
    shares = np.bincount(ids, minlength=4) / 4000
    assert np.abs(shares - [0.1, 0.2, 0.3, 0.4]).max() < 0.025  # three standard deviations


def test_draw_depends_on_seed_and_position_only():
    torch.manual_seed(0)
    row = torch.randn(300)
    others = torch.randn(7, 300)
    alone, _ = sample(row[None].clone(), [params(sampling_seed=9)], [17])
    for place in range(8):
        batch = torch.cat([others[:place], row[None], others[place:]])
        rows = [params(sampling_seed=s) for s in range(100, 108)]
        rows[place] = params(sampling_seed=9)
        positions = list(range(8))
        positions[place] = 17
        assert sample(batch, rows, positions)[0][place] == alone[0]


def test_uniforms_are_spread_and_distinct():
    u = uniforms([s for s in range(100) for _ in range(100)], list(range(100)) * 100)
    assert len(set(u.tolist())) == 10_000
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.04
    assert uniforms([-1], [0]).tolist() == uniforms([2**64 - 1], [0]).tolist()


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.4}, {1}),  # 0.4 of mass is reached by the first alone
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.95, "top_k": 3}, {1, 2, 3}),
    ],
)
def test_truncation_keeps_the_right_tokens_and_the_full_logprob(changes, allowed):
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    ids, logprobs = sample(probs.log().expand(300, 4).clone(), [params(**changes)] * 300, list(range(300)))
    assert set(ids) == allowed
    for token, logprob in zip(ids, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(probs[token]), abs=1e-5)


def test_forbidden_tokens_are_not_drawn():
    logits = torch.tensor([[5.0, 1.0, 1.0]]).expand(50, 3).clone()
    ids, _ = sample(logits, [params()] * 50, list(range(50)), {row: [0] for row in range(50)})
    assert 0 not in ids


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"stop_regex": "("}, "not a regular expression"),
        ({"stop": [""]}, "stop must be"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"temprature": 1}, "Unknown sampling parameter"),
        ({"min_p": 0.1}, "min_p=0.1 is not supported"),
        ({"n": 2}, "n=2 is not supported"),
    ],
)
def test_bad_parameters_are_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_json(raw)


def test_nulls_and_neutral_values_mean_the_default():
    neutral = {"temperature": None, "top_p": None, "min_p": 0.0, "n": 1, "regex": None, "repetition_penalty": 1.0}
    assert SamplingParams.from_json(neutral) == SamplingParams()
    assert SamplingParams.from_json({"stop": "x", "stop_regex": ["y"]}).stop == ("x",)
    assert SamplingParams.from_json({"max_new_tokens": None}).max_new_tokens is None
