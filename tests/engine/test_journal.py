"""The journal of work in hand and the trajectory files, through crashes and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from rl360.engine.journal import Journal, Trajectories, attempt_from_json
from rl360.engine.ledger import Ledger
from rl360.errors import RL360Error
from rl360.types import OutcomeKind, Purpose
from tests.engine.records import assert_same_attempt, make_attempt, make_spec, outcome


def test_journal_gives_back_attempts_in_order(tmp_path):
    attempts = [make_attempt(make_spec(member=i), reward=i / 3) for i in range(4)]
    journal = Journal(tmp_path)
    assert journal.read() == []
    for attempt in attempts:
        journal.append(attempt)
    for written, read in zip(attempts, Journal(tmp_path).read(), strict=True):
        assert_same_attempt(written, read)


def test_journal_survives_a_torn_end_and_goes_on(tmp_path):
    journal = Journal(tmp_path)
    for member in range(3):
        journal.append(make_attempt(make_spec(member=member)))
    os.truncate(journal.path, journal.path.stat().st_size - 5)
    again = Journal(tmp_path)
    assert [a.spec.attempt_id for a in again.read()] == ["i0-a-0", "i0-a-1"]
    again.append(make_attempt(make_spec(member=7)))
    assert [a.spec.attempt_id for a in Journal(tmp_path).read()] == ["i0-a-0", "i0-a-1", "i0-a-7"]


def test_a_checkpoint_makes_the_journal_forget_what_it_covers(tmp_path):
    journal = Journal(tmp_path)
    journal.forget_before(3)  # nothing there yet
    for iteration in (1, 2, 3):
        journal.append(make_attempt(make_spec(iteration=iteration)))
        journal.append(make_attempt(make_spec(iteration=iteration, purpose=Purpose.EVAL)))
    journal.forget_before(2, last_evaluated=2)
    assert [a.spec.attempt_id for a in journal.read()] == ["i2-a-0", "i3-a-0", "e3-a-0"]
    journal.append(make_attempt(make_spec(iteration=4)))
    assert len(journal.read()) == 4


def test_journal_is_appended_to_from_several_threads(tmp_path):
    journal = Journal(tmp_path)

    def append(first: int) -> None:
        for member in range(first, first + 10):
            journal.append(make_attempt(make_spec(member=member)))

    threads = [threading.Thread(target=append, args=(10 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(a.spec.attempt_id.split("-")[-1]) for a in journal.read()) == list(range(30))


def test_trajectories_hold_every_try_with_its_outcome(tmp_path):
    trajectories = Trajectories(tmp_path)
    first, lost = make_attempt(make_spec(member=0)), make_spec(member=1)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.started(make_spec(member=2))
        (open_try,) = ledger.open_tries()
    trajectories.write([(first, outcome(first.spec)), (lost, outcome(lost, OutcomeKind.REQUEUED, "worker_died"))])
    trajectories.write([(open_try, outcome(make_spec(member=2), OutcomeKind.UNUSED, "run_ended"))])
    rows = list(trajectories.rows())
    assert [row["outcome"] for row in rows] == [
        {"kind": "trained", "reason": None},
        {"kind": "requeued", "reason": "worker_died"},
        {"kind": "unused", "reason": "run_ended"},
    ]
    assert_same_attempt(first, attempt_from_json(rows[0]))
    assert rows[2]["spec"]["attempt_id"] == "i0-a-2"
    with pytest.raises(RL360Error, match="with the outcome of"):
        trajectories.write([(first, outcome(lost))])


def test_one_attempt_is_read_through_the_index_alone(tmp_path):
    trajectories = Trajectories(tmp_path)
    attempts = [make_attempt(make_spec(member=i), reward=float(i % 2), sampled=(9,) * (i + 1)) for i in range(5)]
    trajectories.write([(a, outcome(a.spec)) for a in attempts])
    index = trajectories.index(0)
    assert [line["sampled_tokens"] for line in index] == [1, 2, 3, 4, 5]
    assert [line["success"] for line in index] == [False, True, False, True, False]
    # With every other byte of the file gone, the one row still reads.
    line = index[3]
    path = trajectories.path(0)
    data = path.read_bytes()
    path.write_bytes(b"\0" * line["offset"] + data[line["offset"] : line["end"]] + b"\0" * (len(data) - line["end"]))
    assert_same_attempt(attempts[3], attempt_from_json(trajectories.read_one(0, line["try_id"])))
    with pytest.raises(KeyError, match="no try nobody"):
        trajectories.read_one(0, "nobody")


@pytest.mark.parametrize("lose", ["index", "index_line", "row", "half_index_line"])
def test_a_crash_between_row_and_index_is_mended(tmp_path, lose):
    trajectories = Trajectories(tmp_path)
    attempts = [make_attempt(make_spec(member=i)) for i in range(4)]
    trajectories.write([(a, outcome(a.spec)) for a in attempts[:3]])
    index = trajectories.index_path(0)
    lines = index.read_text().splitlines(keepends=True)
    kept = 3
    if lose == "index":
        index.unlink()
    elif lose == "index_line":
        index.write_text("".join(lines[:2]))
    elif lose == "half_index_line":
        index.write_text("".join(lines[:2]) + lines[2][:20])
    else:
        os.truncate(trajectories.path(0), trajectories.path(0).stat().st_size - 3)
        kept = 2
    names = [f"i0-a-{i}.t0" for i in range(kept)]
    assert [line["try_id"] for line in Trajectories(tmp_path).index(0)] == names
    again = Trajectories(tmp_path)
    again.write([(attempts[3], outcome(attempts[3].spec))])
    assert [line["try_id"] for line in again.index(0)] == [*names, "i0-a-3.t0"]
    assert [json.loads(line)["try_id"] for line in index.read_text().splitlines()] == [*names, "i0-a-3.t0"]
    assert again.read_one(0, "i0-a-3.t0")["spec"]["attempt_id"] == "i0-a-3"


def test_cut_takes_back_what_the_ledger_takes_back(tmp_path):
    trajectories = Trajectories(tmp_path)
    rows = []
    for iteration in range(4):
        attempt = make_attempt(make_spec(iteration=iteration))
        evaluation = make_attempt(make_spec(iteration=iteration, purpose=Purpose.EVAL))
        rows += [(attempt, outcome(attempt.spec)), (evaluation, outcome(evaluation.spec, OutcomeKind.EVALUATED))]
    lost = make_spec(iteration=3, group="b")
    rows.append((lost, outcome(lost, OutcomeKind.REQUEUED, "worker_died")))
    trajectories.write(rows)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for what, _ in rows:
            ledger.started(what if what is lost else what.spec)
        ledger.record([o for _, o in rows])
        reopened = {one.try_id for one in ledger.rollback(2, last_evaluated=2)}
    trajectories.cut(2, last_evaluated=2)
    left = {row["spec"]["try_id"] for row in trajectories.rows()}
    assert left == {"i0-a-0.t0", "e0-a-0.t0", "i1-a-0.t0", "e1-a-0.t0", "e2-a-0.t0", "i3-b-0.t0"}
    assert left.isdisjoint(reopened)
    assert len(left | reopened) == len(rows)
    again = make_attempt(make_spec(iteration=2))
    trajectories.write([(again, outcome(again.spec))])
    assert [line["try_id"] for line in trajectories.index(2)] == ["e2-a-0.t0", "i2-a-0.t0"]
    assert trajectories.read_one(2, "i2-a-0.t0")["outcome"]["kind"] == "trained"


KILLED = """
import sys
from pathlib import Path
from rl360.engine.journal import Journal, Trajectories
from tests.engine.records import make_attempt, make_spec, outcome
journal, trajectories = Journal(Path(sys.argv[1])), Trajectories(Path(sys.argv[1]))
for member in range(100000):
    attempt = make_attempt(make_spec(member=member))
    journal.append(attempt)
    trajectories.write([(attempt, outcome(attempt.spec))])
    print(member, flush=True)
"""


def test_kill_9_in_the_middle_keeps_everything_that_was_reported(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 20:
            process.send_signal(signal.SIGKILL)
            break
    rest = process.stdout.read().split()
    process.stdout.close()
    process.wait()
    reported = int(rest[-1]) + 1 if rest else 21
    assert len(Journal(tmp_path).read()) >= reported
    assert len(list(Trajectories(tmp_path).rows())) >= reported
