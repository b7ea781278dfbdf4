"""One machine: the plan runs in this process, or in a child for one point of a sweep.

In: a `Plan` and the run folder that holds its resolved.yaml. Out: an exit code. The run itself is rl360.engine.run's;
workers and the proxy are started by it.

`python -m launchers.local RUN_FOLDER` is what a child runs: it loads resolved.yaml and nothing else.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launchers.plan import Plan, Role, make_plan
from rl360.config.check import load
from rl360.config.files import Found
from rl360.config.run_folder import RESOLVED
from rl360.config.schemas import RootConfig
from rl360.config.workers import num_trial_workers
from rl360.errors import ConfigError, Interrupted, RL360Error
from rl360.interrupts import sigterm_interrupts

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # what shells report for Ctrl-C
_EXIT_CODES = {"finished": 0, "time_limit": 0, "interrupted": EXIT_INTERRUPTED, "failed": EXIT_FAILED}


class LocalLauncher:
    """Takes the fields of `ClusterConfig`."""

    def __init__(
        self,
        name: str,
        client_timeout_s: float,
        trial_timeout_s: float,
        no_progress_s: float,
        gpu_memory_gib: float | None = None,
    ):
        self.name = name
        self.gpu_memory_gib = gpu_memory_gib
        self.client_timeout_s = client_timeout_s
        self.trial_timeout_s = trial_timeout_s
        self.no_progress_s = no_progress_s

    def plan(self, config: RootConfig, found: Found, run_dir: Path) -> Plan:
        """What runs here: the driver with trainer and engine, the session proxy, the trial workers."""
        embedded = config.rollout.engine == "embedded"
        driver = "loop, trainer and embedded engine" if embedded else "loop and trainer"
        roles = (
            Role("driver", "localhost", 1, driver, child_command(run_dir)),
            Role("proxy", "localhost", 1, "session proxy"),
            Role("trial", "localhost", num_trial_workers(config.rollout), "trial worker with its sandboxes"),
        )
        return make_plan(config, found, run_dir, roles)

    def submit(self, plan: Plan, in_process: bool = True) -> int:
        """Run the plan to its end and return the exit code. in_process=False keeps the points of a sweep apart."""
        if in_process:
            return run_folder(Path(plan.run_dir))
        return _child(child_command(Path(plan.run_dir)))


def child_command(run_dir: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "launchers.local", str(run_dir))


def run_folder(run_dir: Path) -> int:
    """Load resolved.yaml and run it. Problems go to stderr; returns the exit code."""
    resolved = OmegaConf.load(run_dir / RESOLVED)
    assert isinstance(resolved, DictConfig)
    config, problems = load(resolved)
    if config is None:
        for problem in problems:
            print(problem, file=sys.stderr)
        return EXIT_FAILED
    from rl360.engine.run import run_experiment

    try:
        with sigterm_interrupts():  # until the run handles it
            outcome = run_experiment(config, resolved)
    except (Interrupted, KeyboardInterrupt) as stopped:
        print(f"interrupted: {str(stopped) or 'at once'}; continue with: rl360 run resume={run_dir}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EXIT_FAILED
    except RL360Error as error:
        print(f"{type(error).__name__}: {error}; logs are in {run_dir / 'logs'}", file=sys.stderr)
        return error.exit_code
    return exit_code(outcome)


def exit_code(outcome: Any) -> int:
    """From what a run returned: its summary, a code, or nothing."""
    if isinstance(outcome, Mapping):
        return _EXIT_CODES.get(str(outcome.get("exit_reason")), EXIT_FAILED)
    return outcome if isinstance(outcome, int) else 0


def _child(command: tuple[str, ...]) -> int:
    """Run one child to its end. A SIGTERM to us is passed on, so that the child can finish its write in hand."""
    child = subprocess.Popen(command)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        child.send_signal(signum)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal sent it to the child too: it stops in its own time
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(run_folder(Path(sys.argv[1])))
