"""The loop that our agents of many turns share: ask, act, answer, until somebody ends it.

In: Harbor's instruction, the sandbox, the session's URL. Out: `context.metadata`: stop, format_ok, and counts. Left to
others: what a reply means and does (each agent's `Dialogue`), sampling, caps and tokens (the session proxy).

The history only grows, and each assistant message goes back exactly as the proxy returned it, so that the policy's
tokens are one sequence. The caps on turns and tokens are the proxy's: an agent that meets one returns normally. Replies
that fail (no readable call, a tool that refused) are answered as errors, and `max_failures` of them in a row end the
attempt as given up. In every case the verifier still runs. So does it when acting on a reply raises anything while the
sandbox still answers: that is a reply that failed. Only a dead sandbox, a host at its end and a failed model call are
raised.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import MCPServerConfig

from rl360.agents.blame import hosts_failure, printable, sandbox_answers
from rl360.agents.endpoint import Endpoint, Reply, Spent
from rl360.agents.shell import Shell
from rl360.types import Stop

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reaction:
    """What one reply led to."""

    messages: tuple[Message, ...] = ()  # the next ones of the history
    malformed: bool = False  # the reply was not in the format that was asked for
    failed: bool = False  # nothing that it asked for worked; a malformed reply without any action counts as well
    actions: int = 0  # commands and tools that ran
    stop: Stop | None = None  # set: the attempt ends here
    code_chars: int | None = None  # length of the solution written, where the agent writes one


class Dialogue(Protocol):
    """One attempt's state between turns."""

    async def react(self, reply: Reply) -> Reaction: ...


@dataclass(slots=True)
class Tally:
    """What an attempt's metadata says."""

    stop: Stop = Stop.AGENT_ERROR  # until something better is known
    turns: int = 0
    format_failures: int = 0
    tool_failures: int = 0
    failures_in_a_row: int = 0
    actions: int = 0
    code_chars: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: Reply, reaction: Reaction) -> None:
        self.turns += 1
        self.prompt_tokens += reply.prompt_tokens or 0
        self.completion_tokens += reply.completion_tokens or 0
        self.format_failures += reaction.malformed
        self.tool_failures += reaction.failed and not reaction.malformed
        self.failures_in_a_row = self.failures_in_a_row + 1 if reaction.failed else 0
        self.actions += reaction.actions
        if reaction.code_chars is not None:
            self.code_chars = reaction.code_chars

    def write(self, context: AgentContext) -> None:
        context.n_input_tokens, context.n_output_tokens = self.prompt_tokens, self.completion_tokens
        context.metadata = {
            "stop": self.stop.value,
            "format_ok": self.turns > 0 and self.format_failures == 0,
            "turns": self.turns,
            "format_failures": self.format_failures,
            "tool_failures": self.tool_failures,
            "actions": self.actions,
            "code_chars": self.code_chars,
        }


class MultiTurnAgent(BaseAgent):
    """Base of our agents.

    Keywords beyond Harbor's: `system_prompt` (None: the agent's own, "": none), `command_timeout_s` of one command,
    `max_output_bytes` of its output that the model sees, `max_failures` in a row, `request_timeout_s` and
    `request_retries` of one model call.
    """

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    def __init__(  # no **kwargs: a keyword that nothing takes must be reported, also before a run
        self,
        logs_dir: Path,
        model_name: str | None = None,
        *,
        logger: logging.Logger | None = None,
        base_url: str | None = None,
        skip_model_parsing: bool = False,
        extra_env: dict[str, str] | None = None,
        mcp_servers: list[MCPServerConfig] | None = None,
        skills_dir: str | None = None,
        load_trajectory: str | None = None,
        override_setup_timeout_sec: float | None = None,
        system_prompt: str | None = None,
        command_timeout_s: float = 30.0,
        max_output_bytes: int = 8000,
        max_failures: int = 3,
        request_timeout_s: float = 600.0,
        request_retries: int = 2,
    ):
        super().__init__(
            logs_dir,
            model_name,
            logger,
            mcp_servers,
            skills_dir,
            base_url=base_url,
            skip_model_parsing=skip_model_parsing,
            extra_env=extra_env,
            load_trajectory=load_trajectory,
            override_setup_timeout_sec=override_setup_timeout_sec,
        )
        self._system_prompt = self.default_system_prompt() if system_prompt is None else system_prompt
        self._command_timeout_s, self._max_output_bytes = command_timeout_s, max_output_bytes
        self._max_failures = max_failures
        self._request_timeout_s, self._request_retries = request_timeout_s, request_retries

    def version(self) -> str:
        return "1"

    def default_system_prompt(self) -> str:
        return ""

    def tools(self) -> Sequence[Message]:
        """OpenAI tool definitions that go with every request; none for text protocols."""
        return ()

    def opening(self, instruction: str) -> str:
        """The first user message."""
        return instruction

    @abstractmethod
    def dialogue(self, instruction: str, environment: BaseEnvironment) -> Dialogue:
        """The state of one attempt."""

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """It has no tool that reaches the web; the sandbox decides about the network."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises what the endpoint and the environment raise; a cap is no error."""
        tally = Tally()
        try:
            await self._converse(instruction, environment, tally)
        except asyncio.CancelledError:
            tally.stop = Stop.TIMEOUT
            raise
        finally:
            tally.write(context)

    async def _converse(self, instruction: str, environment: BaseEnvironment, tally: Tally) -> None:
        messages: list[Message] = [{"role": "user", "content": self.opening(instruction)}]
        if self._system_prompt:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        dialogue, tools = self.dialogue(instruction, environment), self.tools()
        async with Endpoint(
            self._base_url, self.model_name, timeout_s=self._request_timeout_s, retries=self._request_retries
        ) as endpoint:
            while True:
                reply = await endpoint.ask(messages, tools)
                if isinstance(reply, Spent):
                    tally.stop = reply.stop
                    return
                reaction = await self._react(dialogue, reply, environment)
                tally.add(reply, reaction)
                if reaction.stop is not None:
                    tally.stop = reaction.stop
                    return
                if tally.failures_in_a_row >= self._max_failures:
                    tally.stop = Stop.GAVE_UP
                    return
                messages += [reply.message, *(_sendable(message) for message in reaction.messages)]

    async def _react(self, dialogue: Dialogue, reply: Reply, environment: BaseEnvironment) -> Reaction:
        """Raises only what a dead sandbox raises, and a host that is out of disk, memory, files or processes."""
        try:
            return await dialogue.react(reply)
        except Exception as error:
            if hosts_failure(error, environment) or not await sandbox_answers(environment):
                raise
            self.logger.warning("a reply could not be acted on: %s", type(error).__name__, exc_info=True)
            return Reaction(_answers(reply, f"error: that could not be done ({type(error).__name__})"), failed=True)

    def _shell(self, environment: BaseEnvironment) -> Shell:
        return Shell(environment, timeout_s=self._command_timeout_s, max_output_bytes=self._max_output_bytes)


def _answers(reply: Reply, text: str) -> tuple[Message, ...]:
    """The same answer to all that a reply asked for."""
    if not reply.calls:
        return ({"role": "user", "content": text},)
    return tuple({"role": "tool", "tool_call_id": call.get("id"), "content": text} for call in reply.calls)


def _sendable(message: Message) -> Message:
    return {**message, "content": printable(message["content"])}
