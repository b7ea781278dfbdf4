"""Which tasks a band takes, in which order, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl360.errors import TaskError
from rl360.tasks import content_hash, load_tasks
from rl360.tasks.calibration import TaskRate, wilson, write_result
from rl360.tasks.selection import Rule, choose, read_calibration, write_selection
from tests.tasks.test_manifest import make_task, row, write_manifest


def rate(name: str, successes: int, *tags: str, attempts: int = 16, failures: int = 0, digest: str = "") -> TaskRate:
    low, high = wilson(successes, attempts)
    return TaskRate(
        name, tags, digest, attempts, successes, successes / attempts, low, high, failures, {}, {}, 1.0, 1.0, 1.0
    )


def test_the_band_holds_both_ends() -> None:
    rates = [rate(f"t{n:02d}", n, "a", attempts=20) for n in range(21)]
    choice = choose(rates, Rule())
    assert sorted(r.task_id for r in choice.chosen) == ["t04", "t05", "t06", "t07", "t08"]
    assert choice.left_out["t03"] == "pass rate 0.150"


def test_nearest_to_the_middle_first() -> None:
    rates = [rate("a", 4, "x"), rate("b", 5, "x"), rate("c", 6, "x")]  # 0.25, 0.3125, 0.375; the middle is 0.3
    assert [r.task_id for r in choose(rates, Rule()).chosen] == ["b", "a", "c"]


def test_tags_take_turns() -> None:
    rates = [rate(f"lists{n}", 5, "lists", "coding") for n in range(5)] + [
        rate("logic0", 6, "logic", "coding"),
        rate("dicts0", 4, "dicts", "coding"),
    ]
    choice = choose(rates, Rule(count=4))
    assert {r.tags[0] for r in choice.chosen[:3]} == {"lists", "logic", "dicts"}
    assert choice.chosen[3].task_id == "lists1"
    assert choice.left_out["lists4"] == "not needed: enough of its tags"


def test_later_tags_count_too() -> None:
    rates = [rate("a", 5, "x", "common"), rate("b", 5, "x", "common"), rate("c", 5, "x", "rare")]
    assert [r.task_id for r in choose(rates, Rule(count=2)).chosen] == ["a", "c"]


def test_failures_and_few_attempts_are_left_out() -> None:
    rates = [rate("failed", 5, "x", failures=1), rate("few", 1, "x", attempts=4), rate("good", 5, "x")]
    rule = Rule(min_attempts=8)
    assert choose(rates, rule).left_out == {
        "failed": "1 infrastructure failures",
        "few": "4 attempts with a verdict",
    }
    assert len(choose(rates, Rule(max_failures=1, min_attempts=8)).chosen) == 2


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    pool = tmp_path / "pool"
    for name in ("a", "b", "c"):
        make_task(pool, name)
    write_manifest(pool, row("a"), row("b", prompt=[{"role": "user", "content": "Do it."}]), row("c"))
    return pool


def test_what_is_written_loads(pool: Path, tmp_path: Path) -> None:
    rates = [rate(name, n, "x", digest=content_hash(pool / name)) for name, n in (("a", 5), ("b", 4), ("c", 15))]
    write_result(tmp_path, rates, tasks_path=str(pool / "harbor_records.jsonl"), k=16, settings={"model": "m"})
    source, read, content = read_calibration(tmp_path)
    assert read == rates
    target = tmp_path / "chosen"
    choice = choose(read, Rule())
    for copy in (False, True):  # the second replaces the first
        write_selection(target, Path(source), choice, Rule(), content, copy)
        assert [t.task_id for t in load_tasks(target)] == ["a", "b"]
        assert (target / "a").is_symlink() is not copy
    assert json.loads((target / "harbor_records.jsonl").read_text().splitlines()[1])["prompt"][0]["role"] == "user"
    selection = json.loads((target / "selection.json").read_text())
    assert selection["left_out"] == {"c": "pass rate 0.938"}
    assert selection["rule"] == {"low": 0.2, "high": 0.4, "count": None, "max_failures": 0, "min_attempts": 1}
    assert selection["calibration"] == {"k": 16, "settings": {"model": "m"}}


def test_a_prompt_with_line_separators_of_unicode_is_one_row(pool: Path, tmp_path: Path) -> None:
    """JSON allows them unescaped in a text, and only a line break ends a row."""
    text = json.dumps({"prompt": "one\u2028two\u0085three", "metadata": {"instance_id": "a"}}, ensure_ascii=False)
    write_manifest(pool, text)
    rates = [rate("a", 5, "x", digest=content_hash(pool / "a"))]
    write_selection(tmp_path / "out", pool, choose(rates, Rule()), Rule(), {})
    assert (tmp_path / "out" / "harbor_records.jsonl").read_text() == text + "\n"
    assert [task.task_id for task in load_tasks(tmp_path / "out")] == ["a"]


def test_a_changed_task_and_a_folder_of_something_else_are_refused(pool: Path, tmp_path: Path) -> None:
    choice = choose([rate("a", 5, "x", digest="old"), rate("gone", 5, "x")], Rule())
    with pytest.raises(TaskError) as caught:
        write_selection(pool / "a", pool, choice, Rule(), {})
    assert len(caught.value.problems) == 3
    assert "changed since it was calibrated" in caught.value.problems[0]
    assert (pool / "a" / "task.toml").exists()


def test_not_a_calibration(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="rl360 tasks calibrate writes it"):
        read_calibration(tmp_path)
    (tmp_path / "calibration.json").write_text('{"tasks": [{}]}')
    with pytest.raises(TaskError, match="not a calibration"):
        read_calibration(tmp_path)
