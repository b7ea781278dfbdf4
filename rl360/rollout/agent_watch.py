"""What an agent raises: the policy's end, or a failure of what is under it.

In: a Harbor trial that has not begun. Out: `error`, what its agent raised while its sandbox went on answering; the
trial then goes on to the verifier as if the agent had returned. Left to others: what it means for training
(failures.py, which also hears from the proxy how the model calls went), everything else that a trial raises.

An agent is a program that acts on what the policy says, so the policy can make it fail: arguments that it does not
expect, replies nested out of reason, a killed process in the sandbox. Harbor ends most such trials without a verdict,
and an attempt without one is not trained on: the policy could choose not to be judged. So what an agent raises counts
as its own unless it, or what led to it, names the model's side, the sandbox's or this host's, or the sandbox answers no
more.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any

from harbor.trial.trial import Trial

from rl360.agents.blame import chain_of, hosts_failure, sandbox_answers
from rl360.agents.endpoint import ENDPOINT_ERRORS
from rl360.rollout.failures import EXCEPTIONS, Row

log = logging.getLogger(__name__)

_UNDER_THE_AGENT = ("model_", "sandbox_")  # causes of failures that agents wrap in errors of their own


class AgentWatch:
    """Stands between a trial and its agent."""

    def __init__(self, trial: Trial):
        self.error: Exception | None = None
        self._trial = trial
        for name in ("run", "resume"):  # resume: a further step of a task with steps
            setattr(trial.agent, name, self._watched(getattr(trial.agent, name)))

    def _watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        async def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return await run(*args, **kwargs)
            except Exception as error:
                environment = self._trial.agent_environment
                if not is_agents_own(error) or hosts_failure(error, environment):
                    raise
                if not await sandbox_answers(environment):
                    raise
                self.error = error
                log.warning("%s: its agent raised %r in a sandbox that answers", self._trial.config.trial_name, error)
                with contextlib.suppress(OSError):
                    self._trial.paths.exception_message_path.write_text(traceback.format_exc())

        return watched


def is_agents_own(error: Exception) -> bool:
    """Whether an agent's program raises such an error by itself, as far as names tell.

    The error's own class or its nearest known base class decides, and nothing that it was raised from, and no other
    base class, may be a failure of the model's side or of the sandbox.
    """
    if isinstance(error, ENDPOINT_ERRORS):
        return False  # our agents raise nothing else of a model call, and BadRequestError also of a lost session
    rows = _rows_of(error)
    if rows and not _agents(rows[0]):
        return False
    return not any(
        row.cause.startswith(_UNDER_THE_AGENT) and not _agents(row) for one in chain_of(error) for row in _rows_of(one)
    )


def _rows_of(error: BaseException) -> list[Row]:
    return [EXCEPTIONS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in EXCEPTIONS]


def _agents(row: Row) -> bool:
    return row.agents or row.policy is not None
