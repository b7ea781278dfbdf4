"""The Harbor agent of `rl360 tasks validate`: acts out one probe and calls no model.

In: the probe and the task's solution folder, in the place of a model's URL (probe_urls.py): it is what one trial gets
that others do not. Out: what the script left in the sandbox, and `context.metadata`. Left to others:
the scripts (cheaters.py), the verdict (validation.py).
"""

from __future__ import annotations

from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from rl360.tasks.cheaters import BY_NAME, Kind
from rl360.tasks.probe_urls import read_probe_url

_CHEATER_TIMEOUT_S = 60  # they take tenths of a second; a loaded machine may take longer
_SOLUTION_DIR = "/solution"  # Harbor's own place for it
_TAIL_CHARS = 500


class ProbeAgent(BaseAgent):
    """Metadata: `stop` finished, `exit_code` and the end of `output` of what it ran."""

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    @staticmethod
    def name() -> str:
        return "rl360-probe"

    def version(self) -> str:
        return "1"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        name, self._solution = read_probe_url(self._base_url or "")
        self._probe = BY_NAME[name]

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """It has no tools at all."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises what the sandbox raises."""
        context.metadata = {"stop": "finished"}
        if self._probe.kind is Kind.ORACLE:
            await environment.upload_dir(source_dir=self._solution, target_dir=_SOLUTION_DIR)
            command, timeout_s = f"bash {_SOLUTION_DIR}/solve.sh", None  # the agent's own time limit holds
        elif self._probe.kind is Kind.CHEATER:
            command, timeout_s = self._probe.script, _CHEATER_TIMEOUT_S
        else:
            return
        done = await environment.exec(command=command, timeout_sec=timeout_s)
        output = ((done.stdout or "") + (done.stderr or ""))[-_TAIL_CHARS:]
        context.metadata.update(exit_code=done.return_code, output=output)
