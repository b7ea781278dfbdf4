"""The bash agent: OpenAI tool calls (bash, view, edit, submit) until the model submits or a cap ends it.

In: Harbor's instruction. Out: whatever the commands do in the sandbox, and the metadata of multi_turn.py. Left to
others: running tools (tools.py), reading calls out of text (the session proxy's parser of the model family).

A reply without a call that can be read is answered with an error that says what was expected, and counts as a format
failure: so does a call of an unknown tool or with wrong arguments. Three failures in a row end the attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harbor.environments.base import BaseEnvironment

from rl360.agents.endpoint import Reply
from rl360.agents.multi_turn import Message, MultiTurnAgent, Reaction
from rl360.agents.tools import TOOLS, MalformedCall, Toolbox, read_arguments
from rl360.types import Stop

SYSTEM_PROMPT = (
    "You solve a task in a Linux sandbox by calling tools. Look at what is there, make the change, check that it "
    "works, then call submit. Every reply must call a tool."
)
NO_CALL = "No tool call could be read in your reply. Call one of the tools bash, view, edit or submit."
CUT = "Your reply was cut off because it was too long, and nothing was run. Be shorter and call one tool."


class BashAgent(MultiTurnAgent):
    """Keywords: those of MultiTurnAgent."""

    @staticmethod
    def name() -> str:
        return "rl360-bash"

    def default_system_prompt(self) -> str:
        return SYSTEM_PROMPT

    def tools(self) -> Sequence[Message]:
        return TOOLS

    def dialogue(self, instruction: str, environment: BaseEnvironment) -> _Dialogue:
        return _Dialogue(Toolbox(self._shell(environment), self._command_timeout_s))


class _Dialogue:
    def __init__(self, toolbox: Toolbox):
        self._toolbox = toolbox

    async def react(self, reply: Reply) -> Reaction:
        if not reply.calls:
            problem = CUT if reply.truncated else NO_CALL
            return Reaction(({"role": "user", "content": problem},), malformed=True, failed=True)
        answers: list[Message] = []
        malformed = False
        succeeded = actions = 0
        for call in reply.calls:
            function: dict[str, Any] = call["function"]
            try:
                arguments = read_arguments(function["name"], function.get("arguments"))
            except MalformedCall as error:
                malformed = True
                text = f"error: {error}"
            else:
                if function["name"] == "submit":
                    return Reaction(malformed=malformed, actions=actions, stop=Stop.FINISHED)
                result = await self._toolbox.call(function["name"], arguments)
                actions += 1
                succeeded += result.ok
                text = result.text if result.ok else f"error: {result.text}"
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return Reaction(tuple(answers), malformed=malformed, failed=not succeeded, actions=actions)
