"""Harbor's separate verifier, watched: what it must have, and what it says of itself afterwards.

In: a Harbor trial that has not begun and whose tests run in an environment of their own. Out: what kept an artifact
from coming along, and the environments that Harbor made for the tests. Left to others: what follows from either
(trial_worker.py, failures.py).

Harbor downloads artifacts as well as it can: what fails is left out, and the tests then judge an answer that is not
there. What the agent did not leave is not there either, and that is its own doing. So a failed download counts only
where it names this machine or the sandbox's service, or where the sandbox answers no more and the agent has not used
it up.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from harbor.environments.base import BaseEnvironment
from harbor.trial.trial import Trial

from rl360.agents.blame import hosts_failure, sandbox_answers
from rl360.rollout.failures import EXCEPTIONS

_DOWNLOADS = (
    "service_is_dir", "service_download_dir", "service_download_dir_with_exclusions", "service_download_file",
)  # fmt: skip


class SeparateWatch:
    """Stands between a trial and its separate verifier."""

    def __init__(self, trial: Trial):
        self.environments: list[BaseEnvironment] = []  # the tests', also after they have ended
        self._agents = trial.agent_environment
        self.failed: Exception | None = None  # of an artifact: the verdict is about something else than the answer
        for name in _DOWNLOADS:
            setattr(self._agents, name, self._watched(getattr(self._agents, name)))
        make = trial._separate_verifier_env
        trial._separate_verifier_env = self._remembered(make)

    def _watched(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return await call(*args, **kwargs)
            except Exception as error:
                if self.failed is None and await self._is_under_it(error):
                    self.failed = error
                raise

        return watched

    async def _is_under_it(self, error: Exception) -> bool:
        row = next((EXCEPTIONS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in EXCEPTIONS), None)
        if row is not None and not row.agents and row.policy is None:
            return True
        if hosts_failure(error, self._agents):
            return True
        # Our sandboxes say what the agent ran into itself; it is known once one answers no more.
        return not await sandbox_answers(self._agents) and not getattr(self._agents, "exhausted", "")

    def _remembered(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.asynccontextmanager
        async def remembered(*args: Any, **kwargs: Any) -> AsyncIterator[BaseEnvironment]:
            async with make(*args, **kwargs) as environment:
                self.environments.append(environment)
                yield environment

        return remembered
