"""summary.json from the attempts themselves."""

from __future__ import annotations

import json

import pytest

from rl360.config.schemas import RootConfig
from rl360.engine.journal import Trajectories
from rl360.engine.ledger import Ledger
from rl360.engine.summary import packages, summarize, summarize_run, write_summary
from rl360.types import OutcomeKind, Purpose
from tests.engine.records import make_attempt, make_spec, outcome

KEYS = {
    "exit_reason",
    "iterations",
    "reward_first",
    "reward_last",
    "reward_best",
    "reward_last_3_mean",
    "success_rate_first",
    "success_rate_last",
    "attempts",
    "masked_by_cause",
    "wall_s",
    "step_s_median",
    "seed",
    "code_version",
    "packages",
}


def write_run(run_dir, rewards_by_iteration) -> Ledger:
    """One group an iteration, None for a masked attempt; and an evaluation that must not count."""
    ledger, trajectories = Ledger(run_dir / "ledger.jsonl"), Trajectories(run_dir)
    for iteration, rewards in enumerate(rewards_by_iteration):
        attempts = [make_attempt(make_spec(iteration, member=i), reward) for i, reward in enumerate(rewards)]
        kinds = [(OutcomeKind.MASKED, "sandbox_died") if r is None else (OutcomeKind.TRAINED, None) for r in rewards]
        attempts.append(make_attempt(make_spec(iteration, purpose=Purpose.EVAL), reward=0.0))
        kinds.append((OutcomeKind.EVALUATED, None))
        outcomes = [outcome(a.spec, *kind) for a, kind in zip(attempts, kinds, strict=True)]
        for attempt in attempts:
            ledger.started(attempt.spec)
        ledger.record(outcomes)
        trajectories.write(zip(attempts, outcomes, strict=True))
    return ledger


def test_numbers_worked_by_hand(tmp_path):
    rewards = [[0.0, 0.5, None], [1.0, 0.0, 0.0], [1.0, 1.0, 0.25], [1.0, 0.0, None]]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"iteration": i, "time/step_s": s}) + "\n" for i, s in enumerate([4.0, 1.0, 3.0, 9.0]))
    )
    with write_run(tmp_path, rewards) as ledger:
        summary = summarize_run(RootConfig(seed=7), tmp_path, ledger, "finished", wall_s=12.3456)
    assert set(summary) == KEYS
    assert summary["iterations"] == 4
    assert summary["reward_first"] == 0.25  # the masked attempt has none
    assert summary["reward_last"] == 0.5
    assert summary["reward_best"] == 0.75
    assert summary["reward_last_3_mean"] == pytest.approx((1 / 3 + 0.75 + 0.5) / 3)
    assert summary["success_rate_first"] == 1 / 5  # of two and three attempts with a verdict
    assert summary["success_rate_last"] == 3 / 5
    assert summary["attempts"] == {
        "started": 16,
        "trained": 10,
        "filtered": 0,
        "masked": 2,
        "requeued": 0,
        "stale": 0,
        "evaluated": 4,
        "unused": 0,
    }
    assert summary["masked_by_cause"] == {"sandbox_died": 2}
    assert (summary["wall_s"], summary["step_s_median"], summary["seed"]) == (12.346, 3.5, 7)
    assert json.loads(write_summary(tmp_path, summary).read_text()) == summary


def test_iterations_that_a_resume_undid_are_in_no_number(tmp_path):
    """It went back to the second iteration and was stopped before it logged anything: later rows are still there."""
    rows = [{"iteration": i, "time/step_s": s} for i, s in enumerate([4.0, 1.0, 3.0, 9.0])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with write_run(tmp_path, [[0.0, 0.5], [1.0, 0.0], [1.0, 1.0]]) as ledger:
        summary = summarize_run(RootConfig(), tmp_path, ledger, "interrupted", wall_s=1.0, iterations=2)
    assert (summary["reward_best"], summary["step_s_median"]) == (0.5, 2.5)


def test_a_run_without_any_attempt(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        summary = summarize_run(RootConfig(), tmp_path, ledger, "failed", wall_s=1.0)
    assert summary["iterations"] == 0
    assert summary["reward_first"] is summary["reward_best"] is summary["success_rate_last"] is None
    assert summary["step_s_median"] is None


def test_a_run_of_masked_attempts_has_no_reward_and_one_iteration(tmp_path):
    with write_run(tmp_path, [[None, None]]) as ledger:
        summary = summarize_run(RootConfig(), tmp_path, ledger, "interrupted", wall_s=1.0)
    assert (summary["iterations"], summary["reward_first"]) == (1, None)


def test_an_unknown_exit_reason_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected one of finished, failed, interrupted, time_limit"):
        summarize(tmp_path, exit_reason="done", iterations=0, seed=0, wall_s=0.0, attempts={}, masked_by_cause={})


def test_versions_of_what_matters_are_listed():
    assert {"python", "numpy", "tensorboard"} <= set(packages())
