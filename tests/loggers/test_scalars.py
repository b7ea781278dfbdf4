"""Every scalar that a run logs is described."""

from __future__ import annotations

import pytest

from rl360.loggers.scalars import SCALARS, describe


@pytest.mark.parametrize(
    "name",
    [
        "reward/unfiltered_mean",
        "reward/kept_mean",
        "reward/success_rate",
        "reward/domain/coding/mean",
        "reward/domain/coding/count",
        "reward/format_penalty_mean",
        *[f"rollout/samples_{kind}" for kind in ("trained", "filtered", "masked", "requeued")],
        "rollout/response_tokens_mean",
        "rollout/turns_mean",
        "rollout/staleness_max",
        "mismatch/kl",
        "mismatch/ratio_max",
        *[f"train/{name}" for name in ("loss", "grad_norm", "entropy", "clip_fraction", "lr")],
        *[f"time/{name}_s" for name in ("step", "generate", "sandbox", "verify", "train", "publish", "wait")],
        "perf/tokens_per_s",
        "perf/trajectories_per_gpu_hour",
        "eval/success_rate",
        "final/reward_last",
    ],
)
def test_a_documented_scalar_has_a_description(name):
    assert describe(name)


def test_specific_names_win_over_families():
    assert describe("reward/kept_mean").startswith("Mean reward of the attempts that were trained on")
    assert describe("reward/verifier_mean").startswith("Mean of what this reward signal adds")
    assert describe("reward/domain/a/b/mean") == ""
    assert describe("rewardXkept_mean") == ""


def test_times_are_in_seconds_and_names_are_unique():
    assert all(s.unit == "s" for s in SCALARS if s.name.startswith("time/"))
    assert len({s.name for s in SCALARS}) == len(SCALARS)
