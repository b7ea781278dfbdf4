"""A run that starts its own servers: the fleet's real code, with the embedded engine taking SGLang's flags."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl360.diagnostics.recount import recount
from tests.e2e.test_run_tiny import ROOT, RUN_TIMEOUT_S, command, metrics

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

EMBEDDED = f"[{sys.executable},-m,rl360.gateway.embedded.serve]"


def arguments(model: Path, out: Path, sync: str, *more: str) -> list[str]:
    extra = '[--threads,"1",--kv-cache-gib,"0.1"]'
    found = command(
        model, out, "rollout=sglang", f"rollout.sync={sync}", f"rollout.sglang.command={EMBEDDED}",
        "rollout.sglang.dtype=float32", f"rollout.sglang.extra_args={extra}", *more,
    )  # fmt: skip
    found.remove("rollout.deterministic=true")
    return found


def environment(folder: Path) -> dict[str, str]:
    """RL360_TEST marks this test's processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RL360_TEST": str(folder)}


@pytest.mark.parametrize("sync", ["ipc", "nccl"])
def test_two_servers_learn_with_the_trainer(sync, tiny_llama_dir, tmp_path):
    out = tmp_path / "run"
    done = subprocess.run(
        arguments(tiny_llama_dir, out, sync, "rollout.sglang.num_servers=2", "iterations=2"),
        env=environment(tmp_path), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "summary.json").read_text())["attempts"]["trained"] == 16
    assert all(row["mismatch/logprob_diff_mean"] < 1e-4 for row in metrics(out))
    assert recount(out).problems == []
    for index in range(2):
        assert "the embedded engine serves" in (out / "logs" / f"sglang-{index}.log").read_text()


def test_a_server_that_is_killed_in_a_run_is_replaced_and_nothing_is_lost(tiny_llama_dir, tmp_path):
    out = tmp_path / "run"
    run = subprocess.Popen(
        arguments(tiny_llama_dir, out, "disk", "iterations=3", "rollout.request_timeout_s=100"),
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not (out / "metrics.jsonl").is_file() or not (out / "metrics.jsonl").read_text():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        servers = processes(str(tmp_path), "rl360.gateway.embedded.serve")
        os.kill(servers[-1], signal.SIGKILL)
        text, _ = run.communicate(timeout=RUN_TIMEOUT_S)
        assert run.returncode == 0, text
    finally:
        run.kill()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_reason"] == "finished"
    assert summary["attempts"]["masked"] == 0
    assert recount(out).problems == []
    log = (out / "logs" / "driver.log").read_text()
    assert "server 0 is started again" in log
    assert processes(str(tmp_path), "rl360.gateway.embedded.serve") == []


@pytest.mark.parametrize(("sync", "serves", "loses"), [("ipc", 1, 2), ("nccl", 1, 2), ("ipc", 0, 0)])
def test_a_server_that_is_killed_as_weights_arrive_costs_nothing(sync, serves, loses, tiny_llama_dir, tmp_path):
    """It leaves the serving set while the synchronisation is running, and the gateway is told from in there. One that
    leaves in the first one, before there is a gateway, is not among the engines that this begins with."""
    out = tmp_path / "run"
    words = arguments(tiny_llama_dir, out, sync, "rollout.sglang.num_servers=2", "iterations=4")
    perturb = {"PERTURB": "dies", "PERTURB_ONCE": str(tmp_path / "once"), "PERTURB_FROM": str(serves)}
    done = subprocess.run(
        [word.replace("rl360.gateway.embedded.serve", "tests.e2e.perturbed_engine") for word in words],
        env={**environment(tmp_path), **perturb},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "once").exists()
    log = (out / "logs" / "driver.log").read_text()
    assert re.search(rf"version {loses}: http://[\d.:]+ leaves the serving set", log)
    assert all(row["mismatch/logprob_diff_mean"] < 1e-4 for row in metrics(out))
    assert json.loads((out / "summary.json").read_text())["attempts"]["masked"] == 0
    assert recount(out).problems == []


def processes(folder: str, module: str) -> list[int]:
    """Servers (not their keepers) whose driver's run is below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                environ = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if module in words and "rl360.serving.keeper" not in words and f"RL360_TEST={folder}" in environ:
                found.append(int(entry.name))
    return sorted(found)


def test_servers_on_the_trainers_own_gpus(tiny_llama_dir, tmp_path):
    """Memory changes hands in every iteration, for checkpoints, and at the end; the engines' stand-in refuses whatever
    computes without it, and its released weights are NaN."""
    out = tmp_path / "run"
    done = subprocess.run(
        arguments(
            tiny_llama_dir, out, "ipc", "rollout.sglang.colocated=true", "iterations=3", "checkpoint.every=2",
            "checkpoint.keep_last=2", "rollout.sync_mode=drain",
        ),
        env=environment(tmp_path), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(out)
    assert all(row["mismatch/logprob_diff_mean"] < 1e-4 for row in rows)
    assert [row["gateway/engine_resends"] for row in rows] == [0.0] * 3
    assert json.loads((out / "summary.json").read_text())["attempts"]["masked"] == 0
    assert (out / "checkpoints" / "iteration-000002").is_dir()
    assert (out / "checkpoints" / "hf" / "model.safetensors").is_file()
    assert "--enable-memory-saver" in (out / "logs" / "sglang-0.log").read_text()
    assert recount(out).problems == []
