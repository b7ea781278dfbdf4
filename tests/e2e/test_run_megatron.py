"""A run whose trainer is Megatron on two ranks (CPU), with a server of its own that gets each version's weights."""

from __future__ import annotations

import json
import subprocess

import pytest

from rl360.diagnostics.recount import recount
from tests.e2e.test_run_fleet import arguments, environment
from tests.e2e.test_run_tiny import ROOT, metrics, resume_command

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

TIMEOUT_S = 400  # two ranks import megatron-core
MEGATRON = [
    "trainer=megatron",
    "trainer.num_gpus=2",
    "trainer.rank_target=tests.trainers.megatron.cpu_rank:CpuRank",
    "trainer.max_tokens_per_gpu=1024",
    "trainer.start_timeout_s=200",
    "trainer.step_timeout_s=200",
]


def finish(command, folder):
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("axis", ["data", "context", "pipeline"])
def test_a_run_learns_and_goes_on_from_its_checkpoint(axis, tiny_llama_dir, tmp_path):
    out = tmp_path / "run"
    sizes = [] if axis == "data" else [f"trainer.{axis}_parallel_size=2"]
    command = arguments(tiny_llama_dir, out, "disk", *MEGATRON, *sizes, "iterations=2")
    command.remove("trainer.num_threads=1")
    finish(command, tmp_path)
    finish(resume_command(out, "iterations=3"), tmp_path)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_reason"] == "finished"
    assert summary["iterations"] == 3
    rows = metrics(out)
    # What the engine sampled with is what the trainer computes with, after every update and after the resume.
    assert [row["mismatch/logprob_diff_mean"] < 1e-4 for row in rows] == [True] * 3
    assert recount(out).problems == []
    assert (out / "logs" / "trainer-1.log").is_file()
