"""An engine that somebody else serves: the run brings its weights there, by disk, and leaves them there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from rl360.diagnostics.recount import recount
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


def test_rollouts_run_ahead_of_the_weights(tiny_llama_dir, tmp_path):
    """Two versions ahead: attempts go on over weight updates, every count agrees, nothing is stale or thrown away."""
    engine = EmbeddedEngine(
        load_decoder(tiny_llama_dir), tiny_llama_dir, max_running_requests=2, kv_cache_gib=0.1, deterministic=False
    )
    server = EngineServer(engine)
    out = tmp_path / "run"
    try:
        arguments = command(
            tiny_llama_dir, out, "rollout=external", f"rollout.engine_urls=[{server.start()}]",
            "rollout.max_staleness=2", "rollout.max_new_tokens=64", "iterations=5", "algorithm=grpo_async",
        )  # fmt: skip
        arguments.remove("rollout.deterministic=true")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        server.close()
    rows = metrics(out)
    assert [row["rollout/samples_stale"] for row in rows] == [0.0] * 5
    stalest = [row["rollout/staleness_max"] for row in rows]
    assert stalest[0] == 0.0
    assert 1.0 <= max(stalest) <= 2.0
    assert all(row["rollout/staleness_mean"] <= row["rollout/staleness_max"] for row in rows)
    assert all("mismatch/masked_share" in row for row in rows if "train/skipped" not in row)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["attempts"]["unused"] == summary["attempts"]["stale"] == 0
    assert sum(summary["attempts"][kind] for kind in ("trained", "filtered", "masked")) == 5 * 8
    assert recount(out).problems == []
