"""Rates of runs by hand, and a prediction that is checked."""

from __future__ import annotations

import json

import pytest

from benchmarks.loops import main, numbers
from tests.diagnostics.test_simulate_cli import make_run


def recorded(folder, max_staleness, step_s):
    """Attempts of 6.75 s, 2 an iteration; a step of 1 s, 0.25 s to publish."""
    make_run(folder, iterations=4, step_s=step_s, max_staleness=max_staleness)
    config = (folder / "resolved.yaml").read_text().replace("concurrency", "sglang: {colocated: false}, concurrency")
    (folder / "resolved.yaml").write_text(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row |= {"rollout/samples_trained": 1, "rollout/samples_filtered": 1, "perf/tokens_per_s": 75.0}
        row |= {"reward/success_rate": 0.1 * i, "rollout/staleness_max": float(max_staleness)}
    rows[0]["time/step_s"] = 60.0  # compiles
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rates_leave_the_first_iterations_out(tmp_path):
    found = numbers(recorded(tmp_path / "run", 1, 4.0))
    assert found["samples"] == 8
    assert found["samples_per_s"] == pytest.approx(4 / 8.0)  # the last two iterations
    assert found["step_s"] == 4.0
    assert found["wall_s"] == 60.0 + 3 * 4.0
    assert (found["success_first"], found["success_last"]) == pytest.approx((0.05, 0.25))


@pytest.mark.parametrize(("measured_s", "own_s", "exit_code"), [(4.3, 8.0, 0), (6.75, 8.0, 1), (4.3, 6.0, 1)])
def test_a_prediction_is_held_to_15_percent(tmp_path, measured_s, own_s, exit_code):
    """Ahead by one, two iterations are open at once: 6.75 s of attempts and 1.25 s of training, 4 s for each. The run
    that the numbers are from took 8 s; had it taken 6, a prediction that fits would be an accident."""
    fit = recorded(tmp_path / "onpolicy", 0, own_s)
    other = recorded(tmp_path / "ahead", 1, measured_s)
    arguments = ["--out", str(tmp_path / "loops"), "--predict", str(fit), str(other), str(fit), str(other)]
    assert main([*arguments, str(tmp_path / "never_began")]) == exit_code
    text = (tmp_path / "loops.md").read_text()
    assert "| | onpolicy | ahead |" in text
    errors = json.loads((tmp_path / "loops.json").read_text())
    assert errors["prediction_error"] == pytest.approx(4.0 / measured_s - 1)
    assert errors["own_error"] == pytest.approx(8.0 / own_s - 1)
