"""Where the verifier of a trial runs, so that nothing fake gets a reward.

In: a Harbor trial, or a task's own words about its verifier. Out: hooks on the trial, or a changed task config. Left to
others: making sandboxes and copying artifacts (the environments), running the trial (trial_worker.py).

By default the tests see a new sandbox with the agent's artifacts: the working directory, /logs/artifacts and what the
task declares in `artifacts`. An environment with `start_afresh` changes over within the trial; for others the same is
asked of Harbor's own separate verifier environment. A task's word goes first: `[verifier] environment_mode =
"separate"` is Harbor's way, with the declared artifacts only, and "shared" runs the tests where the agent worked, after
a cleaning that cannot undo altered programs.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from harbor.models.task.config import ArtifactConfig, TaskConfig
from harbor.models.task.verifier_mode import (
    VerifierEnvironmentMode,
    resolve_task_verifier_mode,
    task_has_any_shared_verifier,
)
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

from rl360.rollout.separate import SeparateWatch
from rl360.sandboxes.artifact_paths import Artifact

_DEFAULT_WORKDIR = "/app"


class UnsupportedTaskError(ValueError):
    """The task asks for a way of verification that could be fooled."""


def changes_over(import_path: str) -> bool:
    """Whether an environment, named module:Class, can go on in a new sandbox with the artifacts only."""
    module, _, name = import_path.partition(":")
    try:
        environment = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return False  # Harbor says what is wrong with it
    return callable(getattr(environment, "start_afresh", None))


def check(config: TaskConfig) -> None:
    """Raises UnsupportedTaskError for steps that are verified where the agent goes on working."""
    if config.steps and task_has_any_shared_verifier(config):
        raise UnsupportedTaskError(
            "a task with [[steps]] is verified between steps, where the agent goes on working and can fool the tests; "
            'give it [verifier] environment_mode = "separate" and declare artifacts, or make one task of each step'
        )


def separated(config: TaskConfig, task_dir: Path) -> TaskConfig:
    """The config for an environment that cannot change over itself: Harbor's separate mode where the task says nothing.

    The working directory becomes an artifact. Raises UnsupportedTaskError when it is not known.
    """
    if config.steps or _says_where(config):
        return config
    workdir = config.environment.workdir or _workdir_of(task_dir / "environment" / "Dockerfile") or _DEFAULT_WORKDIR
    artifacts = list(config.artifacts)
    if not any((a if isinstance(a, str) else a.source).rstrip("/") == workdir.rstrip("/") for a in artifacts):
        artifacts.insert(0, ArtifactConfig(source=workdir))
    verifier = config.verifier.model_copy(update={"environment_mode": VerifierEnvironmentMode.SEPARATE})
    return config.model_copy(update={"verifier": verifier, "artifacts": artifacts})


def _says_where(config: TaskConfig) -> bool:
    return config.verifier.environment_mode is not None or config.verifier.environment is not None


def _workdir_of(dockerfile: Path) -> str | None:
    """The last WORKDIR, when it is a plain absolute path other than the root."""
    try:
        found = re.findall(r"(?im)^\s*WORKDIR\s+(\S+)\s*$", dockerfile.read_text())
    except OSError:
        return None
    last = found[-1].strip("\"'") if found else ""
    return last if last.startswith("/") and last != "/" and "$" not in last else None


def isolate(trial: Trial) -> SeparateWatch | None:
    """Let the environment change over before verification, or watch Harbor's separate verifier.

    Raises UnsupportedTaskError when it cannot be isolated.
    """
    config, environment = trial.task.config, trial.agent_environment
    if config.steps or resolve_task_verifier_mode(config) is VerifierEnvironmentMode.SEPARATE:
        return SeparateWatch(trial)
    shared = _says_where(config)
    declared = [_artifact(a) for a in config.artifacts]
    if not shared and not callable(getattr(environment, "start_afresh", None)):
        raise UnsupportedTaskError("the tests would run where the agent worked, and the task does not ask for that")

    async def before_verification(_: TrialHookEvent) -> None:
        user = config.verifier.user
        if not shared:
            await environment.start_afresh(declared, user)
        elif hasattr(environment, "settle_for_verifier"):
            await environment.settle_for_verifier(user)

    trial.add_hook(TrialEvent.VERIFICATION_START, before_verification)
    return None


def _artifact(entry: str | ArtifactConfig) -> Artifact:
    return Artifact(entry) if isinstance(entry, str) else Artifact(entry.source, tuple(entry.exclude))
