import json

from rl360.diagnostics.compare import comparison


def test_best_first_and_a_run_without_summary_is_shown(tmp_path):
    for name, rate in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        summary = {"success_rate_last": rate, "iterations": 3, "exit_reason": "finished", "wall_s": 12.3456}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "c").mkdir()
    lines = comparison([("lr=1", tmp_path / "a"), ("lr=2", tmp_path / "b"), ("", tmp_path / "c")])
    assert [line.split()[0] for line in lines[:3]] == ["point", "lr=2", "lr=1"]
    assert lines[1].split() == ["lr=2", "-", "0.750", "-", "-", "3", "-", "12.346", "finished"]
    assert lines[3].startswith("(no overrides)")
    assert lines[3].endswith("no summary")
    assert lines[-1] == f"compare them with: tensorboard --logdir {tmp_path}"


def test_a_broken_summary_is_not_a_crash(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    assert "no summary" in comparison([("x", tmp_path)])[1]
    (tmp_path / "summary.json").write_text("[]")
    assert "no summary" in comparison([("x", tmp_path)])[1]
