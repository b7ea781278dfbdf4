"""An engine that somebody else serves: the run brings its weights there, by disk, and leaves them there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from rl360.diagnostics.recount import _trajectories, recount
from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.server import EngineServer
from rl360.models.loading import load_decoder
from tests.e2e.test_run_tiny import ROOT, RUN_TIMEOUT_S, command, metrics

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


def test_weights_reach_an_engine_by_url(tiny_llama_dir, tmp_path):
    decoder = load_decoder(tiny_llama_dir)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(0.5)  # not the trainer's weights: the first sync must replace them
    engine = EmbeddedEngine(decoder, tiny_llama_dir, max_running_requests=4, kv_cache_gib=0.1, deterministic=False)
    server = EngineServer(engine)
    url = server.start()
    out = tmp_path / "run"
    try:
        arguments = command(tiny_llama_dir, out, "rollout=external", f"rollout.engine_urls=[{url}]", "iterations=2")
        arguments.remove("rollout.deterministic=true")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        trained = load_decoder(out / "checkpoints" / "hf").state_dict()
        served = decoder.state_dict()
        assert all(torch.equal(trained[name], served[name]) for name in trained)
    finally:
        server.close()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["attempts"]["trained"] == 16
    assert all(row["mismatch/logprob_diff_mean"] < 1e-4 for row in metrics(out))
    assert recount(out).problems == []
    assert not list(Path(out / "weights").glob("version-[01]"))  # only the served one is kept


def _run_with_two_slots(model: Path, out: Path, *overrides: str) -> None:
    """Five asynchronous iterations of eight attempts, on an engine that runs two requests at once."""
    engine = EmbeddedEngine(load_decoder(model), model, max_running_requests=2, kv_cache_gib=0.1, deterministic=False)
    server = EngineServer(engine)
    try:
        arguments = command(
            model, out, "rollout=external", f"rollout.engine_urls=[{server.start()}]", "iterations=5",
            "algorithm=grpo_async", *overrides,
        )  # fmt: skip
        arguments.remove("rollout.deterministic=true")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        server.close()


def _trained_lengths(out: Path) -> dict[str, int]:
    """Tokens that were sampled in each attempt that was trained."""
    trained = set()
    for line in (out / "ledger.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("kind") == "trained":
            trained.add(row["try_id"])
    return {
        row["spec"]["attempt_id"]: sum(turn["completion_tokens"] for turn in row["turns"])
        for row in _trajectories(out)
        if row["spec"]["try_id"] in trained
    }


def test_running_ahead_trains_the_same_attempts_long_ones_too(tiny_llama_dir, tmp_path):
    """At learning rate 0 an attempt's answer depends on its seed alone, so both runs can be compared one by one. (What
    is interrupted draws anew behind the interruption, so syncs wait for what runs.) With two slots for eight attempts
    an iteration, taking whatever is ready would prefer the short ones."""
    found = []
    for staleness in (0, 2):
        out = tmp_path / f"run-{staleness}"
        _run_with_two_slots(
            tiny_llama_dir, out, f"rollout.max_staleness={staleness}", "rollout.max_new_tokens=96",
            "algorithm.filter=none", "trainer.learning_rate=0", "rollout.sync_mode=drain",
        )  # fmt: skip
        found.append((_trained_lengths(out), max(row["rollout/staleness_max"] for row in metrics(out))))
    (fresh, none), (ahead, stalest) = found
    assert none == 0 < stalest
    assert len(fresh) == 5 * 8
    assert max(fresh.values()) > 2 * min(fresh.values())  # or there would be nothing to prefer
    assert ahead == fresh


def test_rollouts_run_ahead_of_the_weights(tiny_llama_dir, tmp_path):
    """Two versions ahead: attempts go on over weight updates, every count agrees, nothing is stale or thrown away."""
    out = tmp_path / "run"
    _run_with_two_slots(tiny_llama_dir, out, "rollout.max_staleness=2", "rollout.max_new_tokens=64")
    rows = metrics(out)
    assert [row["rollout/samples_stale"] for row in rows] == [0.0] * 5
    stalest = [row["rollout/staleness_max"] for row in rows]
    assert stalest[0] == 0.0
    assert 1.0 <= max(stalest) <= 2.0
    assert any(row["rollout/mixed_versions_share"] > 0.0 for row in rows)  # attempts that were under way went on
    assert all(row["rollout/staleness_mean"] <= row["rollout/staleness_max"] for row in rows)
    assert all("mismatch/masked_share" in row for row in rows if "train/skipped" not in row)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["attempts"]["unused"] == summary["attempts"]["stale"] == 0
    assert sum(summary["attempts"][kind] for kind in ("trained", "filtered", "masked")) == 5 * 8
    assert recount(out).problems == []
