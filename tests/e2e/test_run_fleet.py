"""A run that starts its own servers: the fleet's real code, with the embedded engine taking SGLang's flags."""

from __future__ import annotations

import contextlib
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
from rl360.serving.ports import claim_ports
from tests.e2e.test_run_tiny import ROOT, RUN_TIMEOUT_S, command, finish, metrics, resume_command

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

# What a shell reports as 130: the exit code, or the signal itself. CPython ends with that after a KeyboardInterrupt out
# of code that was compiled from text (a dataclass that is being made, say), also where it was caught.
INTERRUPTED = (130, -signal.SIGINT)
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


def wait_for_a_row(run: subprocess.Popen[str], out: Path) -> None:
    """Until the run has finished an iteration."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not (out / "metrics.jsonl").is_file() or not (out / "metrics.jsonl").read_text():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
        wait_for_a_row(run, out)
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


@pytest.mark.parametrize("kind", ["dies_generating", "hangs_generating"])
@pytest.mark.parametrize("gateway", ["direct", "smg"])
def test_a_server_that_dies_or_hangs_while_it_generates_loses_no_attempt(gateway, kind, tiny_llama_dir, tmp_path):
    """Its requests are sent to the other one, or their attempts made again; every attempt is trained on."""
    out = tmp_path / "run"
    words = arguments(
        tiny_llama_dir, out, "ipc", "rollout.sglang.num_servers=2", "iterations=4", f"gateway={gateway}",
        "rollout.request_timeout_s=100", "rollout.sglang.health_interval_s=1", "rollout.sglang.health_timeout_s=5",
        "rollout.sglang.health_failures=2",
    )  # fmt: skip
    perturb = {"PERTURB": kind, "PERTURB_ONCE": str(tmp_path / "once"), "PERTURB_FROM": "1"}
    done = subprocess.run(
        [word.replace("rl360.gateway.embedded.serve", "tests.e2e.perturbed_engine") for word in words],
        env={**environment(tmp_path), **perturb},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "once").exists()
    assert re.search(r"server [01] is started again", (out / "logs" / "driver.log").read_text())
    attempts = json.loads((out / "summary.json").read_text())["attempts"]
    assert (attempts["trained"], attempts["masked"], attempts["unused"]) == (32, 0, 0)
    assert attempts["started"] == 32 + attempts["requeued"]
    assert sum(row["gateway/engine_resends"] for row in metrics(out)) + attempts["requeued"] >= 1
    assert all(row["mismatch/logprob_diff_mean"] < 1e-4 for row in metrics(out))
    assert recount(out).problems == []
    assert processes(str(tmp_path), "tests.e2e.perturbed_engine") == []


@pytest.mark.parametrize("gateway", ["direct", "smg"])
def test_when_the_only_server_hangs_in_a_sync_the_run_goes_on_with_its_replacement(gateway, tiny_llama_dir, tmp_path):
    """Turns that wait meanwhile have 20 s of their own; the call that hangs takes 30 s to time out."""
    out = tmp_path / "run"
    words = arguments(
        tiny_llama_dir, out, "ipc", "iterations=4", f"gateway={gateway}", "rollout.request_timeout_s=20",
        "rollout.max_staleness=1",
    )  # fmt: skip
    perturb = {"PERTURB": "hangs", "PERTURB_ONCE": str(tmp_path / "once"), "PERTURB_FROM": "1"}
    done = subprocess.run(
        [word.replace("rl360.gateway.embedded.serve", "tests.e2e.perturbed_engine") for word in words],
        env={**environment(tmp_path), **perturb},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    log = (out / "logs" / "driver.log").read_text()
    assert re.search(
        r"version 2: http://[\d.:]+ leaves the serving set: engine_timeout: .* did not answer in 30 s", log
    )
    assert "version 2: no engine is left; requests wait until a replacement has it" in log
    attempts = json.loads((out / "summary.json").read_text())["attempts"]
    assert (attempts["trained"], attempts["masked"]) == (32, 0)
    assert recount(out).problems == []


def test_the_second_run_with_the_same_ports_is_refused_before_anything_starts(tiny_llama_dir, tmp_path):
    """The first one's server does not listen yet."""
    with contextlib.closing(claim_ports(1, 0)) as free:
        base = free.pairs[0][0]
    first, second = (arguments(tiny_llama_dir, tmp_path / name, "ipc", f"rollout.sglang.base_port={base}",
                               "iterations=100") for name in ("first", "second"))  # fmt: skip
    run = subprocess.Popen(
        first, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not (tmp_path / "first" / "logs" / "sglang-0.log").exists():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        done = subprocess.run(
            second, env=environment(tmp_path), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
            cwd=ROOT,
        )  # fmt: skip
        assert run.poll() is None, "the first run is over; this tests nothing"
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        run.kill()
    assert done.returncode == 1
    assert f"port {base} of rollout.sglang.base_port {base}" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"another run has it, process {run.pid}" in done.stderr
    assert "nothing was started" in done.stderr
    assert not (tmp_path / "second").exists()
    assert run.returncode in INTERRUPTED, text


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_servers_still_start_is_interrupted_at_once(signum, tiny_llama_dir, tmp_path):
    out = tmp_path / "run"
    never = f'[{sys.executable},-c,"import time; time.sleep(300)"]'
    run = subprocess.Popen(
        arguments(tiny_llama_dir, out, "ipc", f"rollout.sglang.command={never}"),
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not (out / "logs" / "sglang-0.log").exists():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.send_signal(signum)
        text, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode in INTERRUPTED, text
    assert f"interrupted: {signum.name} while the run started; continue with: rl360 run resume={out}" in text
    assert "Traceback" not in text
    assert json.loads((out / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if f"RL360_TEST={tmp_path}" in _text(path)]


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_was_interrupted_goes_on_also_when_a_server_was_just_killed(killed, tiny_llama_dir, tmp_path):
    out = tmp_path / "run"
    run = subprocess.Popen(
        arguments(tiny_llama_dir, out, "ipc", "rollout.sglang.num_servers=2", "iterations=4"),
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        wait_for_a_row(run, out)
        if killed:
            os.kill(processes(str(tmp_path), "rl360.gateway.embedded.serve")[0], signal.SIGKILL)
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        run.kill()
    assert run.returncode in INTERRUPTED, text
    before = json.loads((out / "summary.json").read_text())
    assert before["exit_reason"] == "interrupted"
    assert 1 <= before["iterations"] < 4
    assert processes(str(tmp_path), "rl360.gateway.embedded.serve") == []
    finish(resume_command(out), environment(tmp_path))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["exit_reason"], summary["iterations"]) == ("finished", 4)
    assert (summary["attempts"]["trained"], summary["attempts"]["masked"]) == (32, 0)
    assert [row["iteration"] for row in metrics(out)] == [0, 1, 2, 3]
    assert all(row["mismatch/logprob_diff_mean"] < 1e-4 for row in metrics(out))
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
