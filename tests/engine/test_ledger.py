"""One outcome for each try, counts from rows alone, and what a resume takes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.engine.ledger import Ledger, is_run_again
from rl360.errors import CheckpointError, RL360Error
from rl360.types import OutcomeKind, Purpose
from tests.engine.records import make_spec, outcome

TRAINED, FILTERED, MASKED, REQUEUED = (
    OutcomeKind.TRAINED,
    OutcomeKind.FILTERED,
    OutcomeKind.MASKED,
    OutcomeKind.REQUEUED,
)


def test_counts_of_a_small_run(tmp_path):
    """Two groups of two: one trained with one member masked after a requeue, one filtered; one evaluation."""
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        first, second, third = make_spec(member=0), make_spec(member=1), make_spec(member=1, try_number=1)
        others = [make_spec(group="b", member=i) for i in range(2)]
        evaluation = make_spec(purpose=Purpose.EVAL)
        for spec in (first, second, *others, evaluation):
            ledger.started(spec)
        ledger.record(outcome(second, REQUEUED, "sandbox_died"))
        ledger.started(third)
        ledger.record([outcome(first), outcome(third, MASKED, "sandbox_died")])
        ledger.record([outcome(spec, FILTERED, "equal_rewards") for spec in others])
        ledger.record(outcome(evaluation, OutcomeKind.EVALUATED))
        expected = {"started": 6, "trained": 1, "filtered": 2, "masked": 1, "requeued": 1}
        assert ledger.counts() == {**expected, "stale": 0, "evaluated": 1, "unused": 0}
        assert ledger.masked_by_cause() == {"sandbox_died": 1}
        assert ledger.audit() == []
    with Ledger(tmp_path / "ledger.jsonl") as again:
        assert again.counts()["started"] == 6
        assert again.audit() == []


def test_a_second_outcome_is_refused_and_not_written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        spec, other = make_spec(), make_spec(member=1)
        ledger.started(spec)
        ledger.started(other)
        ledger.record(outcome(spec))
        before = path.read_bytes()
        with pytest.raises(RL360Error, match="is masked now and was trained before"):
            ledger.record([outcome(other), outcome(spec, MASKED, "x")])
        with pytest.raises(RL360Error, match="two outcomes"):
            ledger.record([outcome(other), outcome(other)])
        assert path.read_bytes() == before
        assert ledger.outcome_of(other.try_id) is None


@pytest.mark.parametrize(
    ("spec", "kind", "text"),
    [
        (make_spec(purpose=Purpose.EVAL), TRAINED, "evaluation try and cannot be trained"),
        (make_spec(purpose=Purpose.EVAL), FILTERED, "evaluation try and cannot be filtered"),
        (make_spec(), OutcomeKind.EVALUATED, "training try and cannot be evaluated"),
    ],
)
def test_evaluation_never_enters_a_training_count(tmp_path, spec, kind, text):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.started(spec)
        with pytest.raises(RL360Error, match=text):
            ledger.record(outcome(spec, kind))


def test_starts_are_unique_and_come_first(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        with pytest.raises(RL360Error, match="never started"):
            ledger.record(outcome(make_spec()))
        ledger.started(make_spec())
        with pytest.raises(RL360Error, match="started twice"):
            ledger.started(make_spec())
        assert ledger.next_try_number(make_spec().attempt_id) == 1
        assert ledger.next_try_number("unknown") == 0


def test_audit_names_what_does_not_add_up(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        first, second, later = make_spec(), make_spec(try_number=1), make_spec(member=1, try_number=1)
        half, other_half = make_spec(group="b"), make_spec(group="b", member=1)
        for spec in (first, second, later, half, other_half):
            ledger.started(spec)
        ledger.record([outcome(first), outcome(half), outcome(other_half, FILTERED, "equal_rewards")])
        found = "\n".join(ledger.audit())
        assert "2 tries without an outcome" in found
        assert f"{first.try_id} is trained, and yet another try followed" in found
        assert f"repeats {later.retry_of}, which never started" in found
        assert f"attempt {later.attempt_id} has tries [1]; expected [0]" in found
        assert "group i0-b is filtered and trained" in found
        assert not any("without an outcome" in line for line in ledger.audit(ended=False))


def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.started(make_spec())
        ledger.started(make_spec(member=1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with Ledger(path) as ledger:
        assert ledger.counts()["started"] == 1
        ledger.started(make_spec(member=1))
    assert [json.loads(line)["try_id"] for line in path.read_text().splitlines()] == ["i0-a-0.t0", "i0-a-1.t0"]


def test_a_broken_line_in_the_middle_is_reported_with_its_number(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.started(make_spec())
        ledger.started(make_spec(member=1))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("nonsense\n" + lines[1])
    with pytest.raises(CheckpointError, match="line 1"):
        Ledger(path)


@pytest.mark.parametrize(
    ("purpose", "iteration", "resumed", "evaluated", "again"),
    [
        (Purpose.TRAIN, 4, 5, None, False),
        (Purpose.TRAIN, 5, 5, 5, True),
        (Purpose.EVAL, 5, 5, 5, False),  # it was complete before the checkpoint at 5
        (Purpose.EVAL, 5, 5, None, True),  # it was cut, or had not begun
        (Purpose.EVAL, 6, 5, 5, True),
        (Purpose.EVAL, 0, 0, None, True),
        (Purpose.EVAL, 0, 0, 0, False),  # its best checkpoint is the one that the run goes on from
    ],
)
def test_what_a_resume_makes_again(purpose, iteration, resumed, evaluated, again):
    assert is_run_again(purpose, iteration, resumed, evaluated) is again


def test_rollback_opens_the_tries_of_iterations_that_run_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    specs = [make_spec(iteration=i) for i in range(3)]
    lost, gone = make_spec(iteration=2, group="b"), make_spec(iteration=2, group="c")
    with Ledger(path) as ledger:
        for spec in (*specs, lost, gone):
            ledger.started(spec)
        ledger.record([outcome(spec) for spec in specs])
        ledger.record(outcome(gone, REQUEUED, "worker_died"))
        opened = ledger.rollback(1)
        assert [one.try_id for one in opened] == [specs[1].try_id, specs[2].try_id, lost.try_id]
        assert ledger.counts()["trained"] == 1
        assert ledger.counts()["requeued"] == 1  # that try is over whatever is made again
        ledger.record(outcome(specs[1], FILTERED, "equal_rewards"))
    with Ledger(path) as again:
        assert again.counts()["trained"] == 1
        assert again.counts()["filtered"] == 1
        assert [one.try_id for one in again.open_tries()] == [specs[2].try_id, lost.try_id]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["start", *OutcomeKind]), max_size=40), st.data())
def test_replay_equals_memory_and_every_started_try_is_counted_once(tmp_path_factory, moves, data):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    expected: Counter[str] = Counter()
    with Ledger(path) as ledger:
        for number, move in enumerate(moves):
            if move == "start":
                evaluation = data.draw(st.booleans())
                ledger.started(make_spec(member=number, purpose=Purpose.EVAL if evaluation else Purpose.TRAIN))
                expected["started"] += 1
            elif opened := ledger.open_tries():
                one = data.draw(st.sampled_from(opened))
                spec = make_spec(member=int(one.attempt_id.split("-")[-1]), purpose=one.purpose)
                try:
                    ledger.record(outcome(spec, move))
                except RL360Error:
                    continue
                expected[move] += 1
        counts = ledger.counts()
        remaining = len(ledger.open_tries())
    assert {name: number for name, number in counts.items() if number} == dict(expected)
    assert counts["started"] == sum(counts.values()) - counts["started"] + remaining
    with Ledger(path) as again:
        assert again.counts() == counts


KILLED = """
import os, signal, sys
from pathlib import Path
from rl360.engine.ledger import Ledger
from tests.engine.records import make_spec, outcome
ledger = Ledger(Path(sys.argv[1]))
for member in range(5):
    ledger.started(make_spec(member=member))
    ledger.record(outcome(make_spec(member=member)))
ledger.started(make_spec(member=5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_loses_nothing_that_was_written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    with Ledger(path) as ledger:
        assert ledger.counts()["trained"] == 5
        assert [one.try_id for one in ledger.open_tries()] == [make_spec(member=5).try_id]


def test_seconds_of_earlier_processes_are_told_by_their_rows(tmp_path, monkeypatch):
    """Two processes of 5 and 2 s, an hour apart, the second killed in a write; then one whose clock was set back."""
    path, clock = tmp_path / "ledger.jsonl", iter([100.0, 105.0, 3705.0, 3707.0, 9000.0, 8000.0])
    monkeypatch.setattr("rl360.engine.ledger.time.time", lambda: next(clock))
    for member, told in enumerate([0.0, 5.0]):
        with Ledger(path) as ledger:
            assert ledger.earlier_s == told
            ledger.rollback(0)
            ledger.started(make_spec(member=member))
    with open(path, "a") as file:
        file.write('{"event": "started", "at": 3709')
    with Ledger(path) as ledger:
        assert ledger.earlier_s == 7.0
        ledger.rollback(0)
        ledger.started(make_spec(member=2))
    with Ledger(path) as ledger:
        assert ledger.earlier_s == 7.0
