"""Whole Harbor trials in a backend: an agent that runs a given solution, a small task, and solutions that cheat."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities

SOLUTIONS = [
    pytest.param("echo 'double = lambda x: 2 * x' > /app/s.py\n", 1.0, id="oracle"),
    pytest.param("echo 'double = lambda x: x' > /app/s.py\n", 0.0, id="wrong"),
    pytest.param(
        "(while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &\nsleep 0.2\n", 0.0,
        id="a loop writes the reward",
    ),
    pytest.param(
        "printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3\n", 0.0,
        id="another python",
    ),
]  # fmt: skip


class Solves(BaseAgent):
    """Runs the task's solution."""

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    @staticmethod
    def name() -> str:
        return "solves"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec(instruction, timeout_sec=30)


def make_task(folder: Path, solution: str) -> Any:
    from rl360.types import Task

    files = {
        "instruction.md": solution,
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n',
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
        "tests/test.sh": '#!/bin/bash\npython3 /tests/check.py; echo "$((1 - $?))" > /logs/verifier/reward.txt\n',
        "tests/check.py": "import sys\nsys.path.insert(0, '/app')\nfrom s import double\nassert double(3) == 6\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Task(folder.name, folder, ("test",), "")


async def trial(import_path: str, kwargs: dict[str, Any], folder: Path, solution: str, tasks: Any) -> Any:
    """One trial through a trial worker. `tasks`: the worker's task cache, which decides where the tests run."""
    from rl360.config.schemas import AgentConfig, SandboxConfig
    from rl360.rollout.trial_worker import TrialWorker
    from rl360.types import AttemptSpec, Sampling

    worker = TrialWorker(
        agent=asdict(AgentConfig(import_path=f"{__name__}:Solves", timeout_s=60.0)),
        sandbox=asdict(SandboxConfig(import_path=import_path, kwargs=kwargs)),
        cache_dir=folder / "cache", trials_dir=folder / "trials", trial_timeout_s=120.0, model_name="m",
        max_concurrent=4, start_interval_s=0.0, run_id="contract",
    )  # fmt: skip
    await worker.start()
    worker._tasks = tasks
    spec = AttemptSpec("a0", "g0", 0, make_task(folder / "task", solution), Sampling(), 1)
    result = await worker.run(spec, "http://127.0.0.1:1")
    await worker.close()
    return result
