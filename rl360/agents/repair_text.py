"""The repair agent: write a solution, see what its examples say, repair it, with nothing but text.

In: Harbor's instruction, which asks for one fenced block of Python. Out: the solution file in the sandbox, as it was
after the last turn, and the metadata of multi_turn.py. Left to others: grading (the task's verifier), ending the turn
when the block closes (`rollout.stop_at_code_block`).

After each solution a public check runs, and what it complains about is the next user message. By default that is the
task's own examples, `python3 /app/examples.py`: exit code 0 means that they are right, and the output is the complaint.
A task without that file gets check_loads.py: the solution must load and define the function that the instruction names
in backticks, `name(...)`. The hidden tests play no part in it. When the check passes the attempt is finished; turns and
tokens that are used up end it with the last solution in place.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment

from rl360.agents.blocks import extract_code
from rl360.agents.endpoint import Reply
from rl360.agents.multi_turn import MultiTurnAgent, Reaction
from rl360.agents.shell import SandboxFileError, Shell
from rl360.types import Stop

EXAMPLES = "/app/examples.py"
ASK = "Reply with one ```python code block and nothing else."
NO_BLOCK = f"There was no code block. {ASK}"
_FUNCTION = re.compile(r"`([A-Za-z_]\w*)\(")  # as instructions name what is to be written
_LOADS = Path(__file__).with_name("check_loads.py")


def check_command(instruction: str, path: str, examples: str) -> str:
    """Run the task's examples, or load the solution where there are none."""
    named = _FUNCTION.search(instruction)
    file = shlex.quote(examples)
    loads = (
        f"python3 -I -S -B -c {shlex.quote(_LOADS.read_text())} {shlex.join([path, named.group(1) if named else ''])}"
    )
    return f"if [ -f {file} ]; then python3 -I -S -B {file}; else {loads}; fi"


class RepairTextAgent(MultiTurnAgent):
    """Keywords: those of MultiTurnAgent, and

    path: of the solution file.
    examples: script of public examples in the sandbox; it need not be there.
    check_command: runs instead of both.
    """

    def __init__(
        self,
        *args: Any,
        path: str = "/app/solution.py",
        examples: str = EXAMPLES,
        check_command: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._path, self._examples, self._check_command = path, examples, check_command

    @staticmethod
    def name() -> str:
        return "rl360-repair-text"

    def opening(self, instruction: str) -> str:
        return instruction if "```" in instruction else f"{instruction.rstrip()}\n{ASK}"

    def dialogue(self, instruction: str, environment: BaseEnvironment) -> _Dialogue:
        check = self._check_command or check_command(instruction, self._path, self._examples)
        return _Dialogue(self._shell(environment), self._path, check, self._command_timeout_s)


class _Dialogue:
    def __init__(self, shell: Shell, path: str, check: str, timeout_s: float):
        self._shell, self._path, self._check, self._timeout_s = shell, path, check, timeout_s

    async def react(self, reply: Reply) -> Reaction:
        code, alone = extract_code(reply.text)
        if code is None:
            return Reaction(({"role": "user", "content": NO_BLOCK},), malformed=True, failed=True)
        try:
            await self._shell.write_file(self._path, code.encode("utf-8", "replace"))
        except SandboxFileError as error:
            return self._complain(f"{error}", alone, len(code))
        done = await self._shell.run(self._check)
        if done.timed_out:
            return self._complain(f"It did not end within {self._timeout_s:g} s.", alone, len(code))
        if done.code:
            return self._complain(done.output.strip() or f"The check ended with {done.code}.", alone, len(code))
        return Reaction(malformed=not alone, actions=1, stop=Stop.FINISHED, code_chars=len(code))

    def _complain(self, what: str, alone: bool, code_chars: int) -> Reaction:
        message = {"role": "user", "content": f"That does not work:\n{what}\n{ASK}"}
        return Reaction((message,), malformed=not alone, actions=1, code_chars=code_chars)
