"""Pass rates: the interval by hand, what counts, and a journal that continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.errors import TaskError
from rl360.tasks.calibration import Journal, model_fingerprint, open_groups, rate_of, run, wilson, write_result
from rl360.types import (
    Attempt,
    AttemptSpec,
    Group,
    GroupSpec,
    Purpose,
    Sampling,
    Score,
    Stop,
    Task,
    Timings,
    TrialResult,
)

SETTINGS = {"model": "m", "sampling": {"stop": ("a",)}}  # a tuple becomes a list on disk, and is still the same
TASK = Task("double", Path("/nowhere/double"), ("arithmetic", "coding"), "hash-1")


def attempt(spec: AttemptSpec, success: bool | None) -> Attempt:
    scores = {} if success is None else {"verifier": Score(float(success), float(success), success=success)}
    stop = Stop.INFRASTRUCTURE if success is None else Stop.FINISHED
    cause = "sandbox_build" if success is None else None
    return Attempt(spec, (), (), scores, stop, cause, Timings(total_s=2.0), None)


class StubRollout:
    """Finishes each group as it is submitted: `verdicts` by attempt number."""

    def __init__(self, journal: Journal, verdicts: dict[int, bool | None]):
        self.journal, self.verdicts = journal, verdicts
        self.groups: list[GroupSpec] = []
        self.settled: tuple[Attempt, ...] = ()  # as they come back with their group

    def submit(self, spec: GroupSpec) -> None:
        self.groups.append(spec)
        for one in spec.attempts:
            self.journal.add(attempt(one, self.verdicts[int(one.attempt_id.rpartition("-")[2])]))

    def next(self, version: int, timeout_s: float, purpose: Purpose) -> Group:
        assert purpose is Purpose.EVAL
        return Group(self.groups[0], self.settled)


def calibrate(folder: Path, k: int, verdicts: dict[int, bool | None], task: Task = TASK) -> tuple[Any, list[GroupSpec]]:
    journal = Journal(folder, SETTINGS)
    groups = open_groups([task], journal, k, Sampling(), seed=3)
    run(StubRollout(journal, verdicts), groups, 1.0, journal)  # type: ignore[arg-type]
    journal.close()
    return rate_of(task, journal.of(task), k), groups


def test_the_interval_by_hand() -> None:
    # z = 2, 1 of 4: centre (1/4 + 4/8) / 2 = 0.375; half 2/2 * sqrt(3/64 + 4/64) = sqrt(7)/8
    low, high = wilson(1, 4, z=2.0)
    assert (low, high) == pytest.approx((0.375 - 7**0.5 / 8, 0.375 + 7**0.5 / 8))
    assert wilson(0, 16) == pytest.approx((0.0, 0.19361), abs=1e-5)
    assert wilson(4, 16) == pytest.approx((0.10182, 0.49500), abs=1e-4)
    with pytest.raises(ValueError, match="0 successes of 0"):
        wilson(0, 0)


@given(st.integers(1, 200), st.data())
def test_the_interval_holds_the_rate_and_mirrors(attempts: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, attempts))
    low, high = wilson(successes, attempts)
    assert 0.0 <= low <= successes / attempts + 1e-12
    assert successes / attempts - 1e-12 <= high <= 1.0
    assert wilson(attempts - successes, attempts) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_failures_enter_no_rate_and_are_made_again(tmp_path: Path) -> None:
    rate, _ = calibrate(tmp_path, 4, {0: True, 1: None, 2: False, 3: None})
    assert (rate.attempts, rate.successes, rate.rate, rate.infrastructure_failures) == (2, 1, 0.5, 2)
    assert rate.causes == {"sandbox_build": 2}
    rate, groups = calibrate(tmp_path, 4, {1: True, 3: None})
    assert [one.attempt_id[-1] for one in groups[0].attempts] == ["1", "3"]
    assert all(one.try_number > 0 for one in groups[0].attempts)  # its trial folder is not the first one's
    assert (rate.attempts, rate.successes, rate.infrastructure_failures) == (3, 2, 1)


def test_a_verdict_that_came_with_the_group_counts(tmp_path: Path) -> None:
    """Tests that hung on one solution and judged the rest: a failed attempt, not a failure of the machine."""
    journal = Journal(tmp_path, SETTINGS)
    groups = open_groups([TASK], journal, 2, Sampling(), seed=3)
    rollout = StubRollout(journal, {0: True, 1: None})
    first, second = groups[0].attempts
    own = replace(attempt(second, False), stop=Stop.AGENT_ERROR, cause="verifier_timeout")
    rollout.settled = (attempt(first, True), own)
    run(rollout, groups, 1.0, journal)  # type: ignore[arg-type]
    rate = rate_of(TASK, journal.of(TASK), 2)
    assert (rate.attempts, rate.successes, rate.infrastructure_failures) == (2, 1, 0)
    assert rate.stops == {"agent_error": 1, "finished": 1}
    assert open_groups([TASK], journal, 2, Sampling(), seed=3) == []
    journal.close()


def test_tests_that_hang_on_an_attempt_that_is_made_again_judged_others_before(tmp_path: Path) -> None:
    """The command was stopped before its group was whole; made again, the attempt is the only one of its group."""
    calibrate(tmp_path, 3, {0: True, 1: False, 2: None})
    journal = Journal(tmp_path, SETTINGS)
    groups = open_groups([TASK], journal, 3, Sampling(), seed=3)
    rollout = StubRollout(journal, {2: None})
    (spec,) = groups[0].attempts
    trial = TrialResult(spec.try_id, None, "VerifierTimeoutError", "", {"offline": True}, Timings(), Path())
    hung = replace(attempt(spec, None), cause="verifier_timeout", trial=trial)
    rollout.settled = (hung,)
    run(rollout, groups, 1.0, journal)  # type: ignore[arg-type]
    rate = rate_of(TASK, journal.of(TASK), 3)
    assert (rate.attempts, rate.successes, rate.infrastructure_failures) == (3, 1, 0)
    assert rate.stops["agent_error"] == 1
    # With a network the tests may have waited for it: nobody knows.
    rollout.settled = (replace(hung, trial=replace(trial, agent_metadata={})),)
    journal.rows = [row for row in journal.rows if row["cause"] != "verifier_timeout"]
    run(rollout, groups, 1.0, journal)  # type: ignore[arg-type]
    assert rate_of(TASK, journal.of(TASK), 3).infrastructure_failures == 1
    journal.close()


def test_more_attempts_go_on_and_fewer_look_at_the_first(tmp_path: Path) -> None:
    calibrate(tmp_path, 2, {0: True, 1: False})
    rate, groups = calibrate(tmp_path, 4, {2: True, 3: True})
    assert [one.attempt_id[-1] for one in groups[0].attempts] == ["2", "3"]
    assert (rate.attempts, rate.successes) == (4, 3)
    rate, groups = calibrate(tmp_path, 2, {})
    assert groups == []
    assert (rate.attempts, rate.successes) == (2, 1)


def test_seeds_are_of_the_task_and_the_attempt(tmp_path: Path) -> None:
    _, first = calibrate(tmp_path / "a", 3, dict.fromkeys(range(3), True))
    _, second = calibrate(tmp_path / "b", 3, dict.fromkeys(range(3), True))
    seeds = [one.seed for one in first[0].attempts]
    assert seeds == [one.seed for one in second[0].attempts]
    assert len(set(seeds)) == 3


def test_a_torn_line_is_made_again(tmp_path: Path) -> None:
    calibrate(tmp_path, 2, {0: True, 1: True})
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    rate, groups = calibrate(tmp_path, 2, {1: False})
    assert [one.attempt_id[-1] for one in groups[0].attempts] == ["1"]
    assert (rate.attempts, rate.successes) == (2, 1)


def test_a_changed_task_begins_again(tmp_path: Path) -> None:
    calibrate(tmp_path, 1, {0: True})
    rate, groups = calibrate(tmp_path, 1, {0: False}, replace(TASK, content_hash="hash-2"))
    assert len(groups) == 1
    assert (rate.attempts, rate.successes) == (1, 0)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path, SETTINGS).close()
    Journal(tmp_path, SETTINGS).close()
    with pytest.raises(TaskError, match=r"other settings \(model\).*--force"):
        Journal(tmp_path, {**SETTINGS, "model": "n"})


def test_a_task_without_a_verdict_has_no_rate(tmp_path: Path) -> None:
    rate, _ = calibrate(tmp_path, 1, {0: None})
    assert (rate.rate, rate.low, rate.high, rate.tokens_mean) == (None, None, None, None)
    path = write_result(tmp_path, [rate], tasks_path="/pool", k=1, settings=SETTINGS)
    assert json.loads(path.read_text())["tasks"][0]["rate"] is None


def test_the_fingerprint_follows_the_weights_and_not_the_place(tmp_path: Path) -> None:
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    a, b, c = (model_fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c
