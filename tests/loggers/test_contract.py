"""What every logger must take: the same calls on each implementation, through a resume too."""

from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest
from rich.console import Console

from rl360.loggers.console import ConsoleLogger
from rl360.loggers.jsonl import JsonlLogger
from rl360.loggers.tensorboard import TensorBoardLogger
from rl360.protocols import Logger

CONFIG = {
    "name": "quickstart",
    "iterations": 3,
    "seed": 0,
    "trainer": {"learning_rate": 2e-5, "betas": [0.9, 0.98]},
    "paths": {"outputs": "/elsewhere"},
    "evaluation": {"tasks": None},
}
SUMMARY = {
    "exit_reason": "finished",
    "iterations": 3,
    "reward_first": 0.25,
    "reward_last": None,
    "attempts": {"started": 8, "trained": 8},
    "masked_by_cause": {},
    "packages": {"python": "3.12"},
    "wall_s": 61.0,
    "step_s_median": None,
}

MAKERS = {
    "jsonl": JsonlLogger,
    "tensorboard": TensorBoardLogger,
    "console": lambda: ConsoleLogger(Console(file=io.StringIO())),
    "live_console": lambda: ConsoleLogger(Console(file=io.StringIO(), force_terminal=True, width=120)),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def run(logger: Logger, folder, iterations) -> None:
    logger.start(folder, CONFIG)
    for i in iterations:
        logger.log(i, {"reward/unfiltered_mean": i / 2, "time/step_s": 1.5, "own/name": 1, "train/loss": math.nan})
        logger.log_text(i, "sample/0", "```python\nprint('ü')\n```")
        logger.log(i + 1, {"eval/success_rate": 0.5})
    logger.finish(SUMMARY)


def test_it_is_a_logger(make):
    assert isinstance(make(), Logger)


def test_a_whole_run(make, tmp_path):
    run(make(), tmp_path / "run", range(3))


def test_a_run_that_ends_before_its_first_iteration(make, tmp_path):
    run(make(), tmp_path / "run", [])
    failed = make()
    failed.start(tmp_path / "other", CONFIG)
    failed.finish({"exit_reason": "failed", "iterations": 0})


def test_a_resume_continues_the_same_folder(make, tmp_path):
    run(make(), tmp_path / "run", range(2))
    run(make(), tmp_path / "run", range(1, 3))


def test_a_resume_of_a_finished_run(make, tmp_path):
    run(make(), tmp_path / "run", range(3))
    run(make(), tmp_path / "run", [])


def test_nothing_is_written_outside_the_run_folder(make, tmp_path):
    run(make(), tmp_path / "run", range(3))
    assert {path.name for path in tmp_path.iterdir()} <= {"run"}


def test_loggers_import_neither_torch_nor_tensorflow(tmp_path):
    code = """
import sys
from pathlib import Path
from rl360.loggers.console import ConsoleLogger
from rl360.loggers.jsonl import JsonlLogger
from rl360.loggers.tensorboard import TensorBoardLogger
assert not {"rich", "tensorboard", "numpy"} & set(sys.modules), "an import had effects"
for logger in (ConsoleLogger(), JsonlLogger(), TensorBoardLogger()):
    logger.start(Path(sys.argv[1]), {"iterations": 1})
    logger.log(0, {"time/step_s": 1.0})
    logger.log_text(0, "sample", "x")
    logger.finish({"iterations": 1})
print(sorted({"torch", "tensorflow"} & set(sys.modules)))
"""
    env = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
