"""`rl360 run` on a tiny model of each family with a tool-calling agent: sampled, trained, exported, read by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl360.models.decoder import causal_attend
from rl360.models.k2_horizon_hf import register
from rl360.models.loading import load_decoder
from rl360.models.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 240

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


@pytest.mark.parametrize("family", ["qwen3", "k2_horizon"])
def test_a_run_of_the_family(family, tmp_path):
    model, out = write_tiny(tmp_path / "model", family, seed=2), tmp_path / "run"
    chosen = ["experiment=tiny_e2e", f"model=tiny_{family}", "agent=bash", f"model.path={model}", f"output_dir={out}"]
    reward = ["allow_targets=[tests.]", "+reward.tokens._target_=tests.e2e.token_reward.TokenReward"]
    numbers = ["trainer.learning_rate=0.01", "trainer.num_threads=1", "trainer.device=cpu", "group_size=4"]
    limits = ["agent.max_turns=2", "rollout.max_context_tokens=2048"]
    done = subprocess.run(
        [sys.executable, "-m", "rl360.cli", "run", *chosen, *reward, *numbers, *limits],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["exit_reason"], summary["iterations"]) == ("finished", 2)
    assert summary["attempts"]["trained"] == 16
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # Engine and trainer share the weights: what they say of the same tokens differs by rounding only.
    assert [row["mismatch/kl"] < 1e-4 for row in rows] == [True, True]

    from transformers import AutoModelForCausalLM

    register()
    exported = out / "checkpoints" / "hf"
    trained, before = load_decoder(exported), load_decoder(model)
    assert not torch.equal(trained.head_weight, before.head_weight)
    ids = torch.tensor([7, 30, 12, 99, 250])
    with torch.no_grad():
        ours = trained.logits(trained.hidden(ids, torch.arange(5), causal_attend()))
        theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()(ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
