"""calibrate and select as commands, with a random model, real sandboxes and the rollout of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl360.cli import main
from rl360.tasks import load_tasks

pytestmark = pytest.mark.sandbox

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path) -> Said:
    overrides = [
        "tasks=quickstart",
        "model=tiny",
        f"model.path={tiny_llama_dir}",
        "rollout.max_new_tokens=8",
        "rollout.max_context_tokens=512",
        "rollout.num_workers=1",
        "rollout.kv_cache_gib=0.05",
        f"paths.outputs={tmp_path}",
        f"paths.cache={tmp_path / 'cache'}",
    ]

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        code = main(["tasks", command, *arguments, *(overrides if command == "calibrate" else [])])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_calibrate_goes_on_where_it_stopped_and_select_takes_a_band(said: Said, tmp_path: Path) -> None:
    folder = tmp_path / "calibration" / "tiny-small_coding-quickstart"
    code, out, err = said("calibrate", "--k", "1")
    assert code == 0, err
    assert "4 tasks, 4 attempts, pass rate 0.000, 0 infrastructure failures" in out
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines()
    assert len(lines) == 1 + 4
    journal.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while it wrote the last attempt

    code, out, err = said("calibrate", "--k", "2")
    assert code == 0, err
    assert "4 tasks, 8 attempts" in out
    rows = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert len({(row["task_id"], row["attempt"]) for row in rows}) == len(rows) == 8
    assert rows[:3] == [json.loads(line) for line in lines[1:-1]]
    assert {row["tokens"] for row in rows} <= set(range(1, 9))
    rates = json.loads((folder / "calibration.json").read_text())["tasks"]
    assert [(rate["attempts"], rate["rate"], rate["turns_mean"]) for rate in rates] == [(2, 0.0, 1.0)] * 4

    code, _, err = said("calibrate", "--k", "2", "rollout.temperature=0.5")
    assert (code, "other settings (sampling)" in err) == (1, True)
    assert said("select", str(folder), "--out", str(tmp_path / "chosen"))[0] == 1
    assert not (tmp_path / "chosen").exists()
    code, out, _ = said("select", str(folder), "--out", str(tmp_path / "chosen"), "--low", "0", "--count", "2")
    assert code == 0
    assert "2 of 4 tasks" in out
    assert len(load_tasks(tmp_path / "chosen")) == 2
