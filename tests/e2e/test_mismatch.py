"""Engine against trainer in whole runs: an engine that is wrong trips the alarm, one that is right does not, and a
canary run stays flat."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.test_run_fleet import arguments, environment
from tests.e2e.test_run_tiny import ROOT, RUN_TIMEOUT_S, command, metrics, resume_command

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

ALARM = ("mismatch.max_kl=1e-5", "mismatch.stop=true")


def run(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "wrong_from"), [("none", None), ("temperature", 0), ("weights", 1)])
def test_an_engine_that_is_wrong_trips_the_alarm(kind, wrong_from, tiny_llama_dir, tmp_path):
    """Another temperature shows at once, weights that did not arrive from the first version on."""
    out = tmp_path / "run"
    words = arguments(
        tiny_llama_dir, out, "ipc", "iterations=3", "algorithm.filter=none",
        "rollout.sglang.compare_hashes=false", *ALARM,
    )  # fmt: skip
    if kind != "none":
        words = [word.replace("rl360.gateway.embedded.serve", "tests.e2e.perturbed_engine") for word in words]
    done = run(words, {**environment(tmp_path), "PERTURB": kind})
    rows = metrics(out)
    if wrong_from is None:
        assert done.returncode == 0, done.stdout + done.stderr
        assert [row["mismatch/alarm"] for row in rows] == [0.0] * 3
        return
    assert done.returncode != 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_reason"] == "failed"
    assert "mismatch/kl is" in summary["error"]
    assert "the temperature" in summary["error"]  # it is there from the first tokens on
    assert [row["mismatch/alarm"] for row in rows] == [0.0] * wrong_from + [1.0]
    assert rows[-1]["mismatch/position/0-64/kl"] > 1e-5


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_canary_run_stays_flat(engine, tiny_llama_dir, tmp_path):
    """Also over a resume, which gets back the weights that the run was left with."""
    out = tmp_path / "run"
    more = ("iterations=3", "trainer.learning_rate=0", "algorithm.filter=none", *ALARM)
    first = {
        "embedded": command(tiny_llama_dir, out, *more),
        "sglang": arguments(tiny_llama_dir, out, "ipc", *more),
    }[engine]
    for words in (first, resume_command(out, "iterations=5")):
        done = run(words, environment(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["mismatch/canary_growth"] <= 1.5 for row in metrics(out))
    text = (out / "logs" / "driver.log").read_text()
    assert "canary: 5 steps at learning rate 0, weights unchanged" in text
