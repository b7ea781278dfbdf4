"""A Harbor agent that does what its task's instruction says, in JSON: the faults need agents that are busy on cue.

    {"turns": 2, "run": ["commands"], "first": ["commands of the first try only"], "of": {"1": ["of attempt 1 only"]},
     "timeout_s": 30, "raise": "KeyError", "steps": [["commands after turn 1"], ["after turn 2"]]}

It talks to the model `turns` times, then runs the commands in the sandbox, then raises an error of that name. It
repeats nothing and hides nothing; with "instead": true it raises the error also in place of what the endpoint raises.
With "goes_on": true it takes what a sandbox raises for a command's output, as agents do, and goes on.
"""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class InternalServerError(RuntimeError):
    """5xx; one of Harbor's names."""


class APIConnectionError(RuntimeError):
    """No answer; one of Harbor's names."""


class CueAgent(BaseAgent):
    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    @staticmethod
    def name() -> str:
        return "on-cue"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None: ...

    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None: ...

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        cue = json.loads(instruction)
        context.metadata = {"format_ok": True, "stop": "finished"}
        own = type(cue["raise"], (Exception,), {}) if "raise" in cue else None
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for turn in range(cue.get("turns", 1)):
            try:
                messages.append(await self._ask(messages, cue.get("timeout_s", 30.0)))
            except (InternalServerError, APIConnectionError) as error:
                if own is not None and cue.get("instead"):
                    raise own(str(error)) from None
                raise
            for commands in cue.get("steps", [])[turn : turn + 1]:
                await _run_all(commands, environment, cue)
            messages.append({"role": "user", "content": "more"})
        index, number = re.findall(r"-(\d+)\.t(\d+)/", str(self._base_url))[0]
        first = cue.get("first", []) if number == "0" else []
        await _run_all([*first, *cue.get("of", {}).get(index, []), *cue.get("run", [])], environment, cue)
        if own is not None:
            raise own("as the instruction says")

    async def _ask(self, messages: list[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"{self._base_url}/chat/completions"
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.post(url, json={"messages": messages}) as response,
            ):
                if response.status != 200:
                    raise InternalServerError(f"{response.status}: {(await response.text())[:300]}")
                return dict((await response.json())["choices"][0]["message"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise APIConnectionError(f"{type(error).__name__}: {error}") from error


async def _run_all(commands: list[str], environment: BaseEnvironment, cue: dict[str, Any]) -> None:
    for command in commands:
        try:
            await environment.exec(command)
        except RuntimeError:
            if not cue.get("goes_on"):
                raise
