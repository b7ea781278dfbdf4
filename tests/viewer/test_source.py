"""Lines, counts, tags and rows of a run folder, read a little at a time."""

from __future__ import annotations

import os

import pytest

from rl360.engine import frames, journal
from rl360.engine.journal import Trajectories
from rl360.types import OutcomeKind, Purpose
from rl360.viewer import source as source_module
from rl360.viewer.source import Source, _spec_at
from tests.engine.records import make_attempt, make_spec, outcome
from tests.viewer.runs import write_run


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "run")


def test_lines_of_an_iteration_in_order(run_dir):
    lines = Source(run_dir).lines(0)
    assert [line.try_id for line in lines] == [
        "i0-a-0.t0",
        "i0-a-1.t0",
        "i0-a-2.t0",
        "i0-a-3.t0",
        "i0-a-3.t1",
        "i0-b-0.t0",
        "i0-b-1.t0",
        "e0-a-0.t0",
    ]
    assert [line.reward for line in lines] == [0.0, 1.0, 0.25, None, None, 1.0, 1.0, 0.5]
    assert (lines[3].kind, lines[3].reason, lines[3].task_id) == ("requeued", "worker_died", "task-a")
    assert (lines[4].kind, lines[4].stop, lines[4].cause) == ("masked", "infrastructure", "sandbox_died")


def test_members_are_ordered_by_number(tmp_path):
    trajectories = Trajectories(tmp_path)
    for member in (10, 2, 0):
        attempt = make_attempt(make_spec(member=member))
        trajectories.write([(attempt, outcome(attempt.spec))])
    assert [line.attempt_id for line in Source(tmp_path).lines(0)] == ["i0-a-0", "i0-a-2", "i0-a-10"]


def test_totals_by_hand(run_dir):
    totals = Source(run_dir).totals(0)
    assert totals.tries == 8
    assert totals.by_kind == {"trained": 3, "filtered": 2, "masked": 1, "requeued": 1, "evaluated": 1}
    assert totals.reward_mean == pytest.approx((0 + 1 + 0.25 + 1 + 1) / 5)  # the evaluation's 0.5 is not in it
    assert totals.success_rate == pytest.approx(3 / 5)
    assert totals.groups == 3


def test_tags_come_from_the_rows(run_dir):
    source = Source(run_dir)
    by_task = {line.task_id: source.tags(line) for line in source.lines(0)}
    assert by_task == {"task-a": ("coding", "easy"), "task-b": ("tools",)}


def test_open_tries_stand_beside_decided_ones(run_dir):
    source = Source(run_dir)
    assert source.iterations() == [0, 1]
    _, finished, running = source.lines(1)
    assert (finished.try_id, finished.kind, finished.reward, finished.task_id) == ("i1-a-1.t0", "open", 0.75, "task-a")
    assert (running.try_id, running.kind, running.reward, running.task_id) == ("i1-a-2.t0", "open", None, None)
    assert source.row(1, "i1-a-1.t0")["reward"] == 0.75
    assert "outcome" not in source.row(1, "i1-a-1.t0")
    with pytest.raises(KeyError):
        source.row(1, "i1-a-2.t0")


def test_a_run_that_goes_on_is_seen(run_dir):
    source = Source(run_dir)
    assert source.totals(0).tries == 8
    more = make_attempt(make_spec(group="c"), reward=1.0)
    Trajectories(run_dir).write([(more, outcome(more.spec))])
    assert source.totals(0).tries == 9
    assert source.lines(0)[-2].try_id == "i0-c-0.t0"
    assert source.row(0, "i0-c-0.t0")["outcome"] == {"kind": "trained", "reason": None}


def test_a_resume_that_cuts_rows_is_seen(run_dir):
    source = Source(run_dir)
    assert len(source.lines(0)) == 8
    Trajectories(run_dir).cut(0)  # only requeued and unused tries stay
    assert [line.try_id for line in source.lines(0)] == ["i0-a-3.t0"]
    with pytest.raises(KeyError):
        source.row(0, "i0-a-0.t0")


def test_without_an_index_and_with_a_torn_end(run_dir):
    path, index = Trajectories(run_dir).path(0), Trajectories(run_dir).index_path(0)
    index.unlink()
    os.truncate(path, path.stat().st_size - 3)  # the last row, the evaluation's
    before = sorted(os.listdir(run_dir / "trajectories"))
    source = Source(run_dir)
    assert source.totals(0).tries == 7
    assert source.row(0, "i0-a-2.t0")["reward"] == 0.25
    assert sorted(os.listdir(run_dir / "trajectories")) == before  # nothing was written or mended


def test_a_large_file_without_an_index_is_not_read_unasked(run_dir, monkeypatch):
    Trajectories(run_dir).index_path(0).unlink()
    monkeypatch.setattr(source_module, "UNASKED_SCAN_BYTES", 10)
    source = Source(run_dir)
    assert not source.totals(0).complete
    assert source.totals(1).complete
    assert len(source.lines(0)) == 8  # asked for


def test_a_page_may_have_no_time_left_to_scan(run_dir):
    Trajectories(run_dir).index_path(0).unlink()
    source = Source(run_dir)
    assert not source.totals(0, may_scan=False).complete
    assert source.totals(1, may_scan=False).complete
    assert source.totals(0).tries == 8
    assert source.totals(0, may_scan=False).tries == 8  # known by now


def test_lists_read_no_rows_and_an_attempt_reads_one(run_dir, monkeypatch):
    read: list[object] = []
    scan, read_one = frames.scan, frames.read_one
    monkeypatch.setattr(journal.frames, "scan", lambda *a: read.append(("scan", *a)) or scan(*a))
    monkeypatch.setattr(frames, "read_one", lambda *a: read.append(("one", *a)) or read_one(*a))
    source = Source(run_dir)
    assert source.totals(0).tries + len(source.lines(0)) == 16
    assert [source.tags(line) for line in source.lines(0)]
    assert read == []  # tags: the beginning of a row, not the row
    source.row(0, "i0-b-1.t0")
    assert [what[0] for what in read] == ["one", "scan"]


def test_cached_lines_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "KEPT_LINES", 3)
    for iteration in range(4):
        attempts = [make_attempt(make_spec(iteration=iteration, member=i)) for i in range(2)]
        Trajectories(tmp_path).write([(a, outcome(a.spec)) for a in attempts])
    source = Source(tmp_path)
    for iteration in range(4):
        assert len(source.lines(iteration)) == 2
    assert list(source._lines) == [3]
    assert len(source.lines(0)) == 2


@pytest.mark.parametrize("chunk", [3, 50, 1 << 16])
def test_the_spec_of_a_row_is_read_without_the_rest(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(source_module, "HEAD_BYTES", chunk)
    attempt = make_attempt(make_spec(), sampled=tuple(range(70_000)))
    trajectories = Trajectories(tmp_path)
    for spec in (make_spec(member=9), attempt):
        trajectories.write([(spec, outcome(getattr(spec, "spec", spec), OutcomeKind.UNUSED))])
    first, second = trajectories.index(0)
    assert _spec_at(trajectories.path(0), first["offset"])["attempt_id"] == "i0-a-9"
    assert _spec_at(trajectories.path(0), second["offset"])["task"]["tags"] == ["coding", "easy"]


def test_a_row_that_begins_otherwise(tmp_path):
    path = tmp_path / "x.zst"
    frames.append(path, [frames.pack({"spec": {"task": {"tags": ["a"]}}, "format": 2})])
    assert _spec_at(path, 0) == {"task": {"tags": ["a"]}}


def test_a_folder_with_nothing_in_it(tmp_path):
    source = Source(tmp_path)
    assert source.iterations() == []
    assert source.lines(0) == []
    assert source.totals(0).tries == 0


def test_evaluation_is_after_training(run_dir):
    assert [line.purpose for line in Source(run_dir).lines(0)][-2:] == [Purpose.TRAIN.value, Purpose.EVAL.value]
