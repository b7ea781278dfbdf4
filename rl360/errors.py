"""One exception tree. `ConfigError` is for users, `InfrastructureError` for what failed under us, the rest are bugs."""

from __future__ import annotations

from collections.abc import Iterable


class RL360Error(Exception):
    """Base of every error that RL360 raises on purpose. `exit_code` is that of a run that it ends."""

    exit_code = 1


class ConfigError(RL360Error):
    """The experiment is wrong. Holds every problem found, not the first: `key: what was wrong; expected; try`."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TaskError(ConfigError):
    """A task folder or a manifest row is unusable."""


class InfrastructureError(RL360Error):
    """Something under the run failed. `cause` is the short name that the failure table and the ledger use."""

    def __init__(self, cause: str, message: str):
        self.cause = cause
        super().__init__(f"{cause}: {message}")


class EngineError(InfrastructureError):
    """An inference engine answered wrongly, too late or not at all."""


class WorkerDied(InfrastructureError):
    """A worker process ended while calls to it were open."""


class TooManyFailures(RL360Error):
    """More infrastructure failures in one iteration than `rollout.max_masked_share` allows."""


class DiskFull(RL360Error):
    """The run folder's disk is full. What was written is whole, and the run can be resumed once there is room."""

    exit_code = 28  # the number of ENOSPC


class CheckpointError(RL360Error):
    """A checkpoint is incomplete, or does not fit the model."""


class NonFiniteGradient(RL360Error):
    """A gradient is NaN or infinite. The optimizer did not step."""


class MismatchAlarm(RL360Error):
    """Engine and trainer are too far apart, or a run at learning rate 0 changed, and the run was to end then."""


class Interrupted(RL360Error):
    """SIGTERM or Ctrl-C: the write in hand is finished and the run can be resumed."""
