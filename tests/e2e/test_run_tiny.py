"""`rl360 run` as a user starts it, on a tiny random model with real sandboxes: to the end, killed, stopped, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rl360.diagnostics.recount import recount
from rl360.engine.journal import Journal
from rl360.engine.state import CheckpointStore
from rl360.types import Purpose

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 120

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


def command(model: Path, out: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "rl360.cli",
        "run",
        "experiment=tiny_e2e",
        f"model.path={model}",
        "model.random_init=false",
        f"output_dir={out}",
        "allow_targets=[tests.]",
        "+reward.tokens._target_=tests.e2e.token_reward.TokenReward",
        "trainer.learning_rate=0.01",
        "trainer.num_threads=1",
        "rollout.deterministic=true",
        "group_size=4",
        *overrides,
    ]


def resume_command(out: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "rl360.cli", "run", f"resume={out}", *overrides]


@pytest.fixture
def environment(tmp_path_factory) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def finish(arguments: list[str], environment: dict[str, str], expect: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def learned(out: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights and optimizer."""
    last = CheckpointStore(out).latest()
    assert last is not None
    found: dict[str, torch.Tensor] = {}
    for path in sorted(last.trainer_folder.rglob("*")):
        if path.suffix in (".pt", ".safetensors"):
            collect(path.name, load(path), found)
    assert found
    return found


def load(path: Path):
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


def collect(name: str, value, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, inner in value.items():
            collect(f"{name}.{key}", inner, found)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            collect(f"{name}.{index}", inner, found)


def metrics(out: Path) -> list[dict[str, float]]:
    """Rows without what depends on the clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def leftovers(out: Path) -> list[str]:
    """Command lines of living processes that name this run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(out) in line:
                found.append(line)
    return found


def test_a_run_ends_with_everything_written(tiny_llama_dir, tmp_path, environment):
    out = tmp_path / "run"
    done = finish(command(tiny_llama_dir, out, "iterations=2"), environment)
    assert str(out) in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_reason"] == "finished"
    assert summary["iterations"] == 2
    assert summary["attempts"]["started"] == 16
    assert sum(v for k, v in summary["attempts"].items() if k != "started") == 16
    assert [row["iteration"] for row in metrics(out)] == [0, 1]
    for name in ("resolved.yaml", "plan.json", "ledger.jsonl", "tensorboard", "trajectories", "checkpoints", "logs"):
        assert (out / name).exists(), name
    assert recount(out).problems == []
    assert leftovers(out) == []

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "hf")
    saved = learned(out)
    weights = next(v for k, v in saved.items() if k.endswith("model.layers.0.mlp.up_proj.weight"))
    assert torch.equal(model.state_dict()["model.layers.0.mlp.up_proj.weight"], weights)


def test_killed_in_the_middle_and_resumed_it_equals_an_unbroken_run(tiny_llama_dir, tmp_path, environment):
    """Deterministic mode: weights, optimizer and metrics are the same bit for bit; so are data order and outcomes."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    numbers = ("iterations=4", "checkpoint.every=2", "checkpoint.keep_last=4", "tasks_per_iteration=2")
    finish(command(tiny_llama_dir, unbroken, *numbers), environment)

    kill_after_attempts(command(tiny_llama_dir, broken, *numbers), environment, broken, iteration=3, attempts=2)
    assert not (broken / "checkpoints" / "iteration-000004").exists()
    assert "resuming at iteration 3/4: from its checkpoint" in finish(resume_command(broken), environment).stdout

    mine, theirs = learned(unbroken), learned(broken)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert metrics(unbroken) == metrics(broken)
    assert decided(unbroken) == decided(broken)
    assert recount(broken).problems == []
    tries = [json.loads(line) for line in (broken / "ledger.jsonl").read_text().splitlines()]
    again = {row["iteration"] for row in tries if row["event"] == "started" and row["try_number"] > 0}
    # The checkpoint at 2 has the weights that iteration 2 was sampled with; those of iteration 3 are trained again.
    assert again == {3}
    assert leftovers(broken) == []


def test_sigterm_leaves_a_run_that_goes_on(tiny_llama_dir, tmp_path, environment):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(tiny_llama_dir, out, "iterations=30", "checkpoint.every=0"),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) >= 2, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_reason"] == "interrupted"
    done = summary["iterations"]
    assert done >= 2
    assert CheckpointStore(out).latest().state.iteration == done
    assert leftovers(out) == []

    finish(resume_command(out, f"iterations={done + 1}"), environment)
    assert [row["iteration"] for row in metrics(out)] == list(range(done + 1))
    assert json.loads((out / "summary.json").read_text())["exit_reason"] == "finished"
    assert recount(out).problems == []


def kill_after_attempts(arguments, environment, out: Path, iteration: int, attempts: int) -> None:
    """kill -9 the driver once the journal holds so many finished attempts of that iteration."""
    process = subprocess.Popen(
        arguments, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def reached() -> bool:
        finished = [a.spec for a in Journal(out).read()]
        return sum(s.iteration == iteration and s.purpose is Purpose.TRAIN for s in finished) >= attempts

    wait_for(reached, process)
    process.kill()
    process.wait()


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"the run ended by itself with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def decided(out: Path) -> dict[str, tuple[str, str | None]]:
    """Final outcome of each attempt, whichever try it was."""
    found: dict[str, tuple[str, str | None]] = {}
    for line in (out / "ledger.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["event"] == "outcome" and row["kind"] != "requeued":
            found[row["attempt_id"]] = row["kind"], row["reason"]
    return found


def test_a_run_that_is_going_on_keeps_its_resolved_yaml(tiny_llama_dir, tmp_path, environment):
    out = tmp_path / "run"
    with subprocess.Popen(
        command(tiny_llama_dir, out, "iterations=40", "checkpoint.every=0"),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists(), process)
        before = (out / "resolved.yaml").read_text()
        refused = finish(resume_command(out, "iterations=99"), environment, expect=1)
        assert "in use by process" in refused.stderr
        assert (out / "resolved.yaml").read_text() == before
        assert not (out / "summary.json").exists()
        process.kill()


def test_an_evaluation_before_the_first_iteration_counts_once_through_a_kill(tiny_llama_dir, tmp_path, environment):
    """Its checkpoint is the best so far and the one that the resume goes on from."""
    out = tmp_path / "run"
    numbers = (
        "iterations=2",
        "tasks=quickstart",
        "evaluation=quickstart",
        "evaluation.every=1",
        "evaluation.at_start=true",
        "evaluation.k=1",
        "checkpoint.every=100",
    )
    kill_after_attempts(command(tiny_llama_dir, out, *numbers), environment, out, iteration=0, attempts=2)
    finish(resume_command(out), environment)
    assert json.loads((out / "summary.json").read_text())["attempts"]["evaluated"] == 12  # 3 evaluations of 4 tasks
    assert recount(out).problems == []
