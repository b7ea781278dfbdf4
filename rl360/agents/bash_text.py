"""The bash agent for models without tool calls: one fenced command a turn.

In: Harbor's instruction. Out: whatever the commands do in the sandbox, and the metadata of multi_turn.py. Left to
others: the shell (shell.py), ending the turn when a block closes (`rollout.stop_at_code_block`).

The first closed block of a reply is the command; words around it are the model's own affair. A reply without a block is
a format failure, answered with what was expected. Of several blocks the first is run, and the reply counts as a format
failure too. A block that says only `submit` ends the attempt.
"""

from __future__ import annotations

from harbor.environments.base import BaseEnvironment

from rl360.agents.blocks import count_blocks, extract_code
from rl360.agents.endpoint import Reply
from rl360.agents.multi_turn import MultiTurnAgent, Reaction
from rl360.agents.shell import Shell
from rl360.agents.tools import show
from rl360.types import Stop

PROTOCOL = (
    "Work in a Linux shell, one command at a time. Reply with one code block that holds the command, like this:\n"
    "```bash\nls\n```\nThen you see its output. When the task is done, reply with:\n```bash\nsubmit\n```"
)
NO_BLOCK = "There was no command. Reply with one ```bash code block."
CUT = "Your reply was cut off because it was too long, and nothing was run. Reply with one short ```bash code block."
ONLY_FIRST = "[only the first block was run]"
SUBMIT = "submit"


class BashTextAgent(MultiTurnAgent):
    """Keywords: those of MultiTurnAgent."""

    @staticmethod
    def name() -> str:
        return "rl360-bash-text"

    def opening(self, instruction: str) -> str:
        return f"{instruction.rstrip()}\n\n{PROTOCOL}"

    def dialogue(self, instruction: str, environment: BaseEnvironment) -> _Dialogue:
        return _Dialogue(self._shell(environment), self._command_timeout_s)


class _Dialogue:
    def __init__(self, shell: Shell, timeout_s: float):
        self._shell, self._timeout_s = shell, timeout_s

    async def react(self, reply: Reply) -> Reaction:
        command, _ = extract_code(reply.text)
        if command is None:
            problem = CUT if reply.truncated else NO_BLOCK
            return Reaction(({"role": "user", "content": problem},), malformed=True, failed=True)
        several = count_blocks(reply.text) > 1
        if command.strip() == SUBMIT:
            return Reaction(malformed=several, stop=Stop.FINISHED)
        outcome = await self._shell.run(command)
        text = show(outcome, self._timeout_s)
        if several:
            text = f"{text}\n{ONLY_FIRST}"
        answer = ({"role": "user", "content": text},)
        return Reaction(answer, malformed=several, failed=outcome.timed_out, actions=1)
