"""`rl360 tasks` as it is typed: what is refused, and what is said."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rl360.cli import main
from rl360.errors import TaskError
from rl360.tasks import content_hash, load_tasks
from rl360.tasks.arguments import bundled_pools, find_pool
from rl360.tasks.calibration import write_result
from rl360.tasks.tables import _Lines
from tests.tasks.test_manifest import make_task, row, write_manifest
from tests.tasks.test_selection import rate


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["tasks", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("smal_coding", "small_coding"), ("small_coding/overfit23.jsonl", "small_coding/overfit32.jsonl")],
)
def test_a_misspelt_pool_suggests_the_near_one(capsys: pytest.CaptureFixture[str], wrong: str, right: str) -> None:
    for command in ("list", "validate"):
        code, _, err = said(capsys, command, wrong)
        expected = f"{wrong}: no such folder or manifest, and no bundled pool; did you mean {right}?"
        assert (code, err.splitlines()[0]) == (1, expected)


def test_a_pool_like_none_lists_them_all() -> None:
    with pytest.raises(TaskError) as caught:
        find_pool("/nowhere/at/all")
    assert all(name in str(caught.value) for name in bundled_pools())
    assert {"small_coding", "small_coding/overfit32.jsonl", "multi_turn"} <= set(bundled_pools())
    assert all(find_pool(name) in (path, path.parent) for name, path in bundled_pools().items())


@pytest.mark.parametrize("tag", ["a b", "", "a/b", "-x"])
def test_a_tag_that_no_metric_could_be_named_after_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tag: str
) -> None:
    code, _, err = said(capsys, "new", "mine", "--pool", str(tmp_path / "pool"), f"--tag={tag}")
    assert code == 1
    assert f"tag {tag!r}: expected letters, digits" in err
    assert not (tmp_path / "pool").exists()


def test_several_tags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pool = str(tmp_path / "pool")
    assert said(capsys, "new", "mine", "--pool", pool, "--tag", "coding", "--tag", "two-words")[0] == 0
    assert load_tasks(tmp_path / "pool")[0].tags == ("coding", "two-words")


def test_a_band_the_wrong_way_round_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = said(capsys, "select", str(tmp_path), "--low", "0.6", "--high", "0.2", "--out", str(tmp_path / "x"))
    assert (code, err.splitlines()[0]) == (1, "select: --low 0.6 is above --high 0.2; no rate lies between")


def test_a_selection_is_replaced_only_when_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    for name in ("a", "b"):
        make_task(pool, name)
    write_manifest(pool, row("a"), row("b"))
    rates = [rate(name, n, "x", digest=content_hash(pool / name)) for name, n in (("a", 5), ("b", 8))]
    write_result(tmp_path, rates, tasks_path=str(pool / "harbor_records.jsonl"), k=16, settings={})
    target = tmp_path / "chosen"
    assert said(capsys, "select", str(tmp_path), "--out", str(target))[0] == 0
    other = ("select", str(tmp_path), "--out", str(target), "--low", "0.5", "--high", "0.5")
    code, _, err = said(capsys, *other)
    assert (code, "holds a selection; expected another --out, or --force" in err) == (1, True)
    assert [task.task_id for task in load_tasks(target)] == ["a"]
    assert said(capsys, *other, "--force")[0] == 0
    assert [task.task_id for task in load_tasks(target)] == ["b"]
    assert said(capsys, "select", str(tmp_path), "--out", str(pool), "--force")[0] == 1  # no selection
    assert len(load_tasks(pool)) == 2


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    now = [0.0]
    console = Console(file=io.StringIO())
    with _Lines(console, clock=lambda: now[0]) as progress:
        bar = progress.add_task("starting", total=5)
        for number in range(5):
            now[0] += 20.0
            progress.update(bar, advance=1, description=f"task-{number}")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "2 of 5: task-1\n4 of 5: task-3\n"
