"""What a run has in hand, and whether it lives, told from its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rl360.engine.journal import Journal
from rl360.engine.ledger import Ledger
from rl360.engine.state import only_writer
from rl360.types import OutcomeKind
from rl360.viewer import progress
from rl360.viewer.metrics import Metrics
from rl360.viewer.progress import Progress
from tests.engine.records import make_attempt, make_spec, outcome


def open_ids(found: Progress) -> list[str]:
    return [one.try_id for one in found.open_tries()]


def test_open_tries_are_those_of_the_ledger(tmp_path):
    found = Progress(tmp_path)
    assert open_ids(found) == []
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for iteration in range(3):
            for member in range(3):
                ledger.started(make_spec(iteration=iteration, member=member))
        ledger.record(outcome(make_spec(iteration=0, member=1)))
        ledger.record(outcome(make_spec(iteration=1, member=0), OutcomeKind.REQUEUED, "worker_died"))
        ledger.record(outcome(make_spec(iteration=2, member=0)))
        assert open_ids(found) == [one.try_id for one in ledger.open_tries()]
        ledger.rollback(1)
        assert open_ids(found) == [one.try_id for one in ledger.open_tries()]
        assert "i2-a-0.t0" in open_ids(found)
        assert "i1-a-0.t0" not in open_ids(found)


def test_a_row_being_written_is_not_read(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.started(make_spec())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "outc')
    assert open_ids(Progress(tmp_path)) == ["i0-a-0.t0"]
    assert path.read_bytes() == whole + b'{"event": "outc'


def test_only_the_end_of_a_long_ledger_is_read(tmp_path, monkeypatch):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for member in range(100):
            ledger.started(make_spec(member=member))
    monkeypatch.setattr(progress, "LEDGER_TAIL_BYTES", 2000)
    found = open_ids(Progress(tmp_path))
    assert 3 < len(found) < 20
    assert found[-1] == "i0-a-99.t0"


def test_finished_attempts_come_from_the_journal(tmp_path):
    journal, found = Journal(tmp_path), Progress(tmp_path)
    assert found.finished_line("i0-a-0.t0") is None
    journal.append(make_attempt(make_spec(), reward=0.5))
    assert found.finished_line("i0-a-0.t0")["reward"] == 0.5
    journal.append(make_attempt(make_spec(iteration=3), reward=0.25))
    assert found.finished_row("i3-a-0.t0")["reward"] == 0.25
    journal.forget_before(2)  # another file, in which the offsets differ
    assert found.finished_row("i3-a-0.t0")["reward"] == 0.25
    assert found.finished_row("i0-a-0.t0") is None


def test_a_torn_journal_is_left_as_it_is(tmp_path):
    journal = Journal(tmp_path)
    for member in range(2):
        journal.append(make_attempt(make_spec(member=member)))
    os.truncate(journal.path, journal.path.stat().st_size - 4)
    size = journal.path.stat().st_size
    found = Progress(tmp_path)
    assert found.finished_row("i0-a-0.t0") is not None
    assert found.finished_row("i0-a-1.t0") is None
    assert journal.path.stat().st_size == size


def test_a_long_journal_is_read_over_several_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "JOURNAL_BUDGET_S", -1.0)  # one record a request
    journal, found = Journal(tmp_path), Progress(tmp_path)
    for member in range(3):
        journal.append(make_attempt(make_spec(member=member)))
    assert [found.finished_line("i0-a-2.t0") is not None for _ in range(3)] == [False, False, True]


@pytest.mark.skipif(not progress.LOCKS.exists(), reason="no /proc/locks here")
def test_running_is_who_holds_the_lock(tmp_path):
    found = Progress(tmp_path)
    assert found.state() == "stopped"
    with only_writer(tmp_path):
        assert found.state() == "running"
    assert found.state() == "stopped"  # the lock file stays
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": "interrupted"}))
    assert found.state() == "interrupted"


@pytest.mark.skipif(not progress.LOCKS.exists(), reason="no /proc/locks here")
def test_looking_does_not_take_the_lock(tmp_path):
    code = (
        "import sys; from pathlib import Path; from rl360.engine.state import only_writer\n"
        "for _ in range(100):\n    with only_writer(Path(sys.argv[1])): pass"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    found = Progress(tmp_path)
    while run.poll() is None:
        found.state()
    assert run.returncode == 0


def test_a_summary_that_is_none(tmp_path):
    (tmp_path / "summary.json").write_text("[1]")
    assert Progress(tmp_path).summary() == {}


def test_metrics_of_a_run_that_is_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path)
    assert metrics.columns() == {}

    def write(*rewards: float | None, end: str = "") -> None:
        rows = [{"iteration": i, "reward/unfiltered_mean": r, "train/loss": i / 8} for i, r in enumerate(rewards)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)

    write(0.1, 0.2, 0.3, end='{"iteration": 3, "rew')
    assert {i: row["reward/unfiltered_mean"] for i, row in metrics.columns().items()} == {0: 0.1, 1: 0.2, 2: 0.3}
    assert metrics.row(2) == {"iteration": 2, "reward/unfiltered_mean": 0.3, "train/loss": 0.25}
    assert metrics.row(3) == {}
    write(0.1, None)
    assert metrics.columns() == {0: {"reward/unfiltered_mean": 0.1}, 1: {"reward/unfiltered_mean": None}}
    assert metrics.row(2) == {}
