import inspect
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl360.algorithms.grpo import GRPO
from rl360.config.schemas import AlgorithmConfig
from rl360.errors import ConfigError
from rl360.types import Keep, Stop
from tests.algorithms.helpers import attempt, group_of, rewards_group, segment


def logs(*probabilities):
    return torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64)


def test_constructor_takes_exactly_the_fields_of_its_config_with_their_defaults():
    parameters = inspect.signature(GRPO).parameters
    config = {f.name: f.default for f in fields(AlgorithmConfig) if f.name != "_target_"}
    assert {name: p.default for name, p in parameters.items()} == config


def test_every_bad_argument_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        GRPO(clip_low=2.0, kl_estimator="k4", reducer="mean", updates_per_batch=0, importance_cap=0.0, filter="x")
    assert len(caught.value.problems) == 6
    assert any("k1, k2, k3" in problem for problem in caught.value.problems)


def test_filter_none_keeps_every_group():
    assert GRPO(filter="none").keep(rewards_group(1.0, 1.0)) == Keep(True)
    assert GRPO().keep(rewards_group(1.0, 1.0)) == Keep(False, "equal_rewards")


def test_loss_by_hand_on_four_tokens():
    # ratios 1.5 (A 1: clipped to 1.28), 0.5 (A 1: stays), 1.5 (A -1: stays), 0.5 (A -1: clipped to 0.8)
    # corrections: 0.4/0.2 = 2, 0.4/0.4 = 1, 0.4/0.05 = 8 -> cap 2, 0.4/0.8 = 0.5
    current = logs(0.6, 0.2, 0.6, 0.2).requires_grad_()
    proximal, behaviour = logs(0.4, 0.4, 0.4, 0.4), logs(0.2, 0.4, 0.05, 0.8)
    advantages, weights = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.full((4,), 0.25)
    loss, metrics = GRPO().loss(current, proximal, behaviour, advantages, weights, None)
    assert loss.item() == pytest.approx(0.25 * (-2 * 1.28 - 1 * 0.5 + 2 * 1.5 + 0.5 * 0.8))
    assert metrics["train/clip_fraction"].item() == pytest.approx(0.5)
    loss.backward()
    # d ratio / d logprob = ratio; a clipped token has none
    assert current.grad.tolist() == pytest.approx([0.0, -0.25 * 0.5, 0.25 * 2 * 1.5, 0.0])


def test_on_policy_gradient_is_minus_correction_times_advantage():
    current = logs(0.3, 0.3).requires_grad_()
    loss, _ = GRPO().loss(current, current, logs(0.3, 0.2), torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.5]), None)
    loss.backward()
    assert current.grad.tolist() == pytest.approx([-0.5 * 2.0, 0.5 * 1.5])


def test_kl_to_the_reference_is_added_uncorrected():
    algorithm = GRPO(kl_coef=0.1, kl_estimator="k3")
    assert algorithm.needs_reference
    assert not GRPO().needs_reference
    current = logs(0.5).requires_grad_()
    zero, one = torch.zeros(1), torch.ones(1)
    loss, metrics = algorithm.loss(current, current, logs(0.1), zero, one, logs(0.25))
    assert loss.item() == pytest.approx(0.1 * (0.5 - 1 + math.log(2)))
    assert metrics["train/reference_kl"].item() == pytest.approx(0.5 - 1 + math.log(2))
    with pytest.raises(ValueError, match="kl_coef"):
        algorithm.loss(current, current, logs(0.1), zero, one, None)


@given(st.integers(0, 500), st.integers(0, 12))
def test_loss_gradient_and_metrics_add_up_over_any_split(seed, cut):
    draw = np.random.default_rng(seed)
    current, proximal, behaviour, reference = (torch.tensor(-draw.exponential(2, 12)) for _ in range(4))
    advantages, weights = torch.tensor(draw.normal(size=12)), torch.tensor(draw.dirichlet(np.ones(12)))
    algorithm = GRPO(kl_coef=0.05)

    def run(part):
        leaf = current[part].clone().requires_grad_()
        loss, metrics = algorithm.loss(
            leaf, proximal[part], behaviour[part], advantages[part], weights[part], reference[part]
        )
        return loss.item(), {k: v.item() for k, v in metrics.items()}, torch.autograd.grad(loss, leaf)[0]

    loss, metrics, gradient = run(slice(None))
    parts = [run(part) for part in (slice(0, cut), slice(cut, 12)) if len(current[part])]
    assert sum(p[0] for p in parts) == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), gradient)
    for name, value in metrics.items():
        combined = max if name.endswith("_max") else sum
        assert combined(p[1][name] for p in parts) == pytest.approx(value, abs=1e-9)


@given(st.integers(0, 500), st.booleans())
def test_loss_against_token_by_token_python(seed, with_cap):
    draw = np.random.default_rng(seed)
    current, proximal, behaviour, reference = (-draw.exponential(1.5, 9) for _ in range(4))
    advantages, weights = draw.normal(size=9), draw.dirichlet(np.ones(9))
    low, high, cap = 0.1, 0.3, 1.7 if with_cap else None
    expected = 0.0
    for c, p, b, r, a, w in zip(current, proximal, behaviour, reference, advantages, weights, strict=True):
        ratio = math.exp(c - p)
        limit = 1 + high if a >= 0 else 1 - low
        surrogate = a * (min(ratio, limit) if a >= 0 else max(ratio, limit))
        correction = 1.0 if cap is None else min(math.exp(p - b), cap)
        expected += w * (-correction * surrogate + 0.2 * (c - r) ** 2 / 2)
    algorithm = GRPO(clip_low=low, clip_high=high, importance_cap=cap, kl_coef=0.2, kl_estimator="k2")
    arrays = (torch.tensor(x) for x in (current, proximal, behaviour, advantages, weights, reference))
    assert algorithm.loss(*arrays)[0].item() == pytest.approx(expected, rel=1e-9)


def test_prepare_by_hand():
    # group a: rewards 1, 0, masked; group b: rewards 1, 0.7 with two segments and with nothing sampled
    group_a = group_of(
        attempt(1.0, segment(sampled=3), number=0, group="a"),
        attempt(0.0, segment(sampled=1), number=1, group="a"),
        attempt(None, segment(sampled=5), number=2, group="a"),
        group="a",
    )
    group_b = group_of(
        attempt(1.0, segment(sampled=2), segment(prompt=6, sampled=2), segment(sampled=0), number=0, group="b"),
        attempt(0.7, number=1, group="b"),
        attempt(0.4, segment(), number=2, group="b", stop=Stop.INFRASTRUCTURE),
        group="b",
    )
    batch = GRPO().prepare([group_a, group_b])
    assert (batch.num_sequences, batch.num_trained_tokens) == (4, 8)
    assert [s.attempt_id for s in batch.sequences] == ["a-0", "a-1", "b-0", "b-0"]
    advantages = [s.advantages_T[s.loss_mask_T] for s in batch.sequences]
    for found, expected in zip(advantages, ([0.5] * 3, [-0.5], [0.15] * 2, [0.15] * 2), strict=True):
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
    for sequence in batch.sequences:
        assert np.array_equal(sequence.weights_T, np.where(sequence.loss_mask_T, np.float32(1 / 8), 0))
        assert not sequence.advantages_T[~sequence.loss_mask_T].any()
        assert sequence.weights_T.dtype == sequence.advantages_T.dtype == np.float32

    by_sequence = GRPO(reducer="sequence_mean").prepare([group_a, group_b])
    weights = [float(s.weights_T[-1]) for s in by_sequence.sequences]
    assert weights == pytest.approx([1 / 9, 1 / 3, 1 / 12, 1 / 12])


attempts = st.tuples(
    st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.sampled_from([-0.3, 0.0, 1.0])),
    st.sampled_from([Stop.FINISHED, Stop.LENGTH, Stop.INFRASTRUCTURE]),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)


@given(
    st.lists(st.lists(attempts, max_size=5), max_size=4),
    st.booleans(),
    st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_any_mix_of_attempts_passes_through(groups, normalize_std, reducer):
    algorithm = GRPO(normalize_std=normalize_std, reducer=reducer)
    made = [
        group_of(
            *(
                attempt(r, *(segment(sampled=n) for n in sizes), number=i, group=f"g{g}", stop=stop, scored=scored)
                for i, (r, stop, sizes, scored) in enumerate(members)
            ),
            group=f"g{g}",
        )
        for g, members in enumerate(groups)
    ]
    kept = [group for group in made if algorithm.keep(group).keep]
    for batch in (algorithm.prepare(kept), algorithm.prepare(made)):
        weights = [s.weights_T for s in batch.sequences]
        assert batch.num_trained_tokens == sum(int(s.loss_mask_T.sum()) for s in batch.sequences)
        assert all(np.isfinite(s.advantages_T).all() for s in batch.sequences)
        if weights:
            assert float(np.concatenate(weights).sum(dtype=np.float64)) == pytest.approx(1.0, rel=1e-5)
    assert not kept or algorithm.prepare(kept).sequences


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (attempt(1.0, segment(prompt=0)), "first token"),
        (attempt(1.0, segment(logprob=math.nan)), "not finite"),
        (attempt(1.0, segment(), temperature=0.0), "temperature"),
    ],
)
def test_untrainable_segments_are_named(bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        GRPO().prepare([group_of(bad)])
    assert bad.spec.try_id in str(caught.value)


def test_masked_and_truncated_tokens_by_hand():
    # ratios proximal / behaviour 1/4 (masked), 1, 4 (truncated to 2); advantages 1, weights 1/4, 1/4, 1/2
    current = logs(0.1, 0.4, 0.8).requires_grad_()
    weights = torch.tensor([0.25, 0.25, 0.5])
    algorithm = GRPO(importance_cap=2.0, importance_mask_below=0.5, importance_mask_above=5.0)
    loss, metrics = algorithm.loss(current, current.detach(), logs(0.4, 0.4, 0.2), torch.ones(3), weights, None)
    loss.backward()
    assert current.grad.tolist() == pytest.approx([0.0, -0.25, -1.0])
    assert metrics["mismatch/masked_share"].item() == pytest.approx(0.25)
    assert metrics["mismatch/truncated_share"].item() == pytest.approx(0.5)
    assert metrics["mismatch/correction_mean"].item() == pytest.approx(0.25 + 0.5 * 2)


def test_without_a_band_or_a_cap_there_is_no_metric_of_it():
    arguments = (logs(0.5), logs(0.5), logs(0.4), torch.ones(1), torch.ones(1), None)
    assert "mismatch/masked_share" not in GRPO().loss(*arguments)[1]
    assert "mismatch/correction_mean" not in GRPO(importance_cap=None).loss(*arguments)[1]


def test_sequence_level_takes_the_weights_that_it_gave():
    algorithm = GRPO(importance_level="sequence", importance_cap=3.0)
    assert algorithm.needs_sequence_ratios
    assert not GRPO().needs_sequence_ratios
    (given,) = algorithm.sequence_correction(torch.tensor([math.log(2.0)]), torch.tensor([2]))
    current = logs(0.5, 0.25).requires_grad_()
    arguments = (current, current.detach(), logs(0.1, 0.9), torch.ones(2), torch.tensor([0.5, 0.5]), None)
    loss, metrics = algorithm.loss(*arguments, given.expand(2))
    loss.backward()
    assert current.grad.tolist() == pytest.approx([-1.0, -1.0])  # both tokens by 2, whatever their own ratios
    assert metrics["mismatch/correction_mean"].item() == pytest.approx(2.0)
    with pytest.raises(ValueError, match="sequence corrections"):
        algorithm.loss(*arguments)


def test_the_band_at_sequence_level_masks_whole_sequences_by_hand():
    """Per sequence the ratios, their product and geometric mean, against a band from 0.8 to 1.25 and a cap of 3:

    A: 4 and 1/4, 1 and 1: inside, weight 1, though both of its tokens are outside
    B: 1.5 and 1.5, 2.25 and 1.5: above, weight 0
    C: 0.6 and 0.9, 0.54 and 0.735: below, weight 0
    D: 1.2 twice, 1.44 and 1.2: inside, weight 1.44
    """
    current = logs(0.8, 0.1, 0.6, 0.3, 0.3, 0.45, 0.6, 0.6).requires_grad_()
    behaviour = logs(0.2, 0.4, 0.4, 0.2, 0.5, 0.5, 0.5, 0.5)
    band = {"importance_cap": 3.0, "importance_mask_below": 0.8, "importance_mask_above": 1.25}
    algorithm = GRPO(importance_level="sequence", **band)
    sums = (current.detach() - behaviour).view(4, 2).sum(1)
    given = algorithm.sequence_correction(sums, torch.full((4,), 2))
    assert given.tolist() == pytest.approx([1.0, 0.0, 0.0, 1.44])
    arguments = (current, current.detach(), behaviour, torch.ones(8), torch.full((8,), 0.125), None)
    loss, metrics = algorithm.loss(*arguments, given.repeat_interleave(2))
    loss.backward()
    assert current.grad.tolist() == pytest.approx([-0.125] * 2 + [0.0] * 4 + [-0.18] * 2)
    assert metrics["mismatch/masked_share"].item() == pytest.approx(0.5)
    token_level = GRPO(**band).loss(*arguments)[1]  # token by token: one of C's and D's two are inside
    assert token_level["mismatch/masked_share"].item() == pytest.approx(5 / 8)


def test_every_impossible_correction_is_named():
    with pytest.raises(ConfigError) as caught:
        GRPO(importance_level="turn", importance_mask_below=1.5, importance_mask_above=0.5)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "algorithm.importance_level",
        "algorithm.importance_mask_below",
        "algorithm.importance_mask_above",
    ]
