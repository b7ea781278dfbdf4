"""What every backend decides alike: the network, limits, and what comes along into the verifier's sandbox.

In: a task's own wishes and the configured limits. Out: which of them holds. Raises SandboxBuildFailedError for what a
sandbox cannot be. Left to others: making that sandbox (the backends).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harbor.environments.base import SandboxBuildFailedError
from harbor.models.task.config import EnvironmentConfig, NetworkMode

from rl360.sandboxes.artifact_paths import Artifact, problems_of

DEFAULT_WORKDIR = "/app"  # what comes along when the image names no working directory
ARTIFACT_LOGS, VERIFIER_LOGS, TESTS = "/logs/artifacts", "/logs/verifier", "/tests"
DEFAULT_ARTIFACTS_MIB = 1024  # where the disk has no limit


class MemoryLimitExceededError(RuntimeError):
    """The sandbox ran into its memory limit and ended. The name is one of Harbor's error table."""


def wants_network(name: str, config: EnvironmentConfig, mode: NetworkMode, allowed: bool) -> bool:
    """Harbor's default is a public network; here a task has to say so. Raises where it may not have one."""
    if "network_mode" not in config.model_fields_set or mode == NetworkMode.NO_NETWORK:
        return False
    if not allowed:
        raise SandboxBuildFailedError(
            f"{name}: the task asks for network_mode={mode.value!r} and sandbox.network is false; set it to true or "
            "leave the task out"
        )
    return True


def smaller(configured: float, asked: float | None) -> Any:
    """The smaller of two limits, where 0 and None mean no limit."""
    limits = [value for value in (configured, asked) if value]
    return min(limits) if limits else type(configured)(0)


def check_artifacts(name: str, artifacts: Sequence[Artifact]) -> None:
    """Raises for paths that cannot be carried."""
    if problems := problems_of([artifact.path for artifact in artifacts]):
        raise SandboxBuildFailedError(
            f"{name}: {'; '.join(problems)}; choose other paths, or [verifier] environment_mode "
            '= "shared", which is weaker'
        )


def only_root_writes(verifier_user: str | int | None, image_user: str | None) -> bool:
    """Whether the tests run as root: a test that runs the answer as another user is not graded by it."""
    return verifier_user in (None, "root", 0, "0") and image_user in (None, "", "root", "0")
