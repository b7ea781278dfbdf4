"""Scalars of one iteration from groups made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl360.engine.metrics import outcome_metrics, rollout_metrics
from rl360.types import Group, GroupSpec, Outcome, OutcomeKind, Purpose, Score, Stop
from tests.engine.records import make_attempt, make_spec


def group(*attempts):
    spec = attempts[0].spec
    return Group(GroupSpec(spec.group_id, spec.iteration, spec.task, tuple(a.spec for a in attempts)), attempts)


def counted(attempt, failures):
    return replace(attempt, trial=replace(attempt.trial, agent_metadata={"format_failures": failures}))


def test_means_are_over_attempts_with_a_reward_and_success_is_apart_from_penalties():
    """Rewards 1, 0 and one masked; the right one pays a penalty of 0.3: mean (0.7 + 0) / 2, success 1 of 2."""
    right = make_attempt(make_spec(member=0), reward=1.0)
    right = replace(right, scores={**right.scores, "format_penalty": Score(1.0, -0.3)})
    wrong = make_attempt(make_spec(member=1), reward=0.0)
    masked = replace(make_attempt(make_spec(member=2)), scores={}, stop=Stop.INFRASTRUCTURE, cause="x")
    metrics = rollout_metrics([group(right, wrong, masked)], [], version=4)
    assert metrics["reward/unfiltered_mean"] == pytest.approx(0.35)
    assert metrics["reward/success_rate"] == 0.5
    assert metrics["reward/verifier_mean"] == 0.5
    assert metrics["reward/format_penalty_mean"] == pytest.approx(-0.3)
    assert metrics["rollout/response_tokens_mean"] == 3.0
    assert metrics["rollout/staleness_max"] == 4 - right.oldest_version
    assert "reward/kept_mean" not in metrics  # nothing was kept: no mean, not a zero


def test_format_failures_are_averaged_over_agents_that_count_them():
    three, one = (counted(make_attempt(make_spec(member=i)), n) for i, n in enumerate((3, 1)))
    silent = make_attempt(make_spec(member=2))
    assert rollout_metrics([group(three, one, silent)], [], 0)["rollout/format_failures_mean"] == 2.0
    assert "rollout/format_failures_mean" not in rollout_metrics([group(silent)], [], 0)


def test_an_iteration_of_failures_has_counts_and_no_means():
    masked = replace(make_attempt(make_spec()), scores={}, stop=Stop.INFRASTRUCTURE, cause="sandbox_died")
    metrics = rollout_metrics([group(masked)], [], 0)
    assert not any(name.startswith("reward/") and not name.startswith("reward/domain/") for name in metrics)
    outcomes = [Outcome("a.t0", "a", "g", 0, Purpose.TRAIN, OutcomeKind.MASKED, "sandbox_died")]
    assert outcome_metrics(outcomes) == {
        "rollout/samples_trained": 0.0,
        "rollout/samples_filtered": 0.0,
        "rollout/samples_masked": 1.0,
        "rollout/samples_stale": 0.0,
        "rollout/masked/sandbox_died": 1.0,
    }
