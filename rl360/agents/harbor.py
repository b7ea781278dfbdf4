"""Any other Harbor agent: by Harbor's name for it, or by import path.

In: `agent`, such as mini-swe-agent or my_package.agent:MyAgent, and that agent's own `options`. Out: that agent, with
the one thing that training needs of every agent: its run ends normally when the session is at a cap, so that the
verifier runs. Left to others: everything that the agent does.

What such an agent must do for its tokens to be trained on as one sequence: speak OpenAI chat completions with the
session's base URL, only append to its history, and not summarise it. Agents that run inside the sandbox need a sandbox
that can reach the proxy; a sandbox without a network cannot.
"""

from __future__ import annotations

import asyncio
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.factory import AgentFactory
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.name import AgentName
from harbor.models.trial.config import AgentConfig

from rl360.types import Stop

# What agents and their client libraries call a request that the proxy refused because of a cap.
CAP_ERRORS = frozenset(
    {
        "ContextLengthExceededError",
        "ContextWindowExceededError",
        "OutputLengthExceededError",
        "OutputTokenExceededError",
    }
)
_KEY = {"OPENAI_API_KEY": "unused"}  # client libraries refuse to start without one; the proxy asks for none


class HarborAgent(BaseAgent):
    """Calling it makes the named agent, which is of no class in this file. Keywords beyond Harbor's:

    agent: Harbor's name of the agent, or module:Class.
    options: the agent's own keywords.
    litellm_provider: put in front of the model's name, as agents on LiteLLM need it ("" for none).
    """

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    def __new__(
        cls,
        *args: Any,
        agent: str,
        options: dict[str, Any] | None = None,
        litellm_provider: str = "openai",
        model_name: str | None = None,
        extra_env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Any:
        made = capped(find(agent))
        if made.MODEL_CONNECTION is None:  # it calls no model, such as the oracle
            kwargs.pop("base_url", None)
        name = f"{litellm_provider}/{model_name}" if litellm_provider and model_name else model_name
        return made(*args, model_name=name, extra_env={**_KEY, **(extra_env or {})}, **kwargs, **(options or {}))

    def __init__(
        self,
        *args: Any,
        agent: str,
        options: dict[str, Any] | None = None,
        litellm_provider: str = "openai",
        **kwargs: Any,
    ):
        """Never called: `__new__` returns another class. It stands here so that configs are checked against it."""
        raise AssertionError("HarborAgent(...) makes the named agent")

    @staticmethod
    def name() -> str:
        return "rl360-harbor"

    def version(self) -> str:
        raise AssertionError("HarborAgent(...) makes the named agent")

    async def setup(self, environment: BaseEnvironment) -> None:
        raise AssertionError("HarborAgent(...) makes the named agent")

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        raise AssertionError("HarborAgent(...) makes the named agent")


def find(agent: str) -> type[BaseAgent]:
    """The class. Raises ValueError for an unknown name, listing Harbor's, and for the oracle."""
    if agent == AgentName.ORACLE.value:
        raise ValueError("agent.kwargs.agent: the oracle runs a task's own solution; there is nothing to train on")
    config = AgentConfig(import_path=agent) if ":" in agent else AgentConfig(name=agent)
    return AgentFactory.get_agent_class_from_config(config)


def capped(cls: type[BaseAgent]) -> type[BaseAgent]:
    """A subclass whose run ends normally at a cap and says in the metadata how it ended."""

    class Capped(cls):
        async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
            stop = Stop.AGENT_ERROR
            try:
                await super().run(instruction, environment, context)
                stop = Stop.FINISHED
            except asyncio.CancelledError:
                stop = Stop.TIMEOUT
                raise
            except Exception as error:
                if not CAP_ERRORS & {kind.__name__ for kind in type(error).__mro__}:
                    raise
                stop = Stop.LENGTH
            finally:
                context.metadata = {"stop": stop.value, **(context.metadata or {})}

    Capped.__name__ = Capped.__qualname__ = cls.__name__
    return Capped
