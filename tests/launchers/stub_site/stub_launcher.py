"""A launcher that runs nothing: it records what it was given and writes a summary. For tests of the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

from launchers.local import LocalLauncher
from launchers.plan import Plan
from rl360.config.run_folder import RESOLVED


class StubLauncher(LocalLauncher):
    """The exit code is RL360_STUB_EXIT; the success rate is read from the learning rate, so that points differ."""

    def submit(self, plan: Plan, in_process: bool = True) -> int:
        from omegaconf import OmegaConf

        folder = Path(plan.run_dir)
        values = OmegaConf.load(folder / RESOLVED)
        rate = values.trainer.learning_rate
        summary = {
            "exit_reason": "finished",
            "iterations": values.iterations,
            "success_rate_first": 0.25,
            "success_rate_last": min(1.0, rate * 1e4),
            "in_process": in_process,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return int(os.environ.get("RL360_STUB_EXIT", "0"))
