"""A shell that remembers: commands in the sandbox whose working directory and environment last from one to the next.

In: a bash command. Out: an `Outcome`: exit code, output cut to size, whether the time was up. Left to others: which
commands (the agents), where they run (a Harbor environment).

Harbor's `exec` starts a new shell each time. Here each command saves its working directory and its exported variables
when it ends, and the next one begins with them. Standard output and error go to one file in the order in which they
came, and only its beginning and end leave the sandbox: neither endless output nor a background process that keeps the
output open holds anything up. A command that is out of time is ended with its whole process group, and what it had
printed is kept. Background processes of commands that end in time live on.
"""

from __future__ import annotations

import base64
import shlex
import time
from dataclasses import dataclass

from harbor.environments.base import BaseEnvironment

from rl360.agents.blame import printable, small_integer, timed_out

STATE_DIR = "/tmp/.rl360-shell"
MAX_FILE_BYTES = 1_000_000  # of a file that is read or written whole
_MAX_QUOTED = 100_000  # bytes; one argument of a process may have 128 KiB
_CHUNK = 60_000  # base64 characters of a file that one command carries
_GRACE_S = 10  # the environment's own deadline comes this much later than ours
_KILLED = (124, 137)  # exit codes of `timeout`: it ended the command, or had to kill it
_RESTORE = (
    'trap \'__rl360_code=$?; { export -p; printf "cd -- %q\\n" "$PWD"; } >{dir}/state.new 2>/dev/null && '
    "mv -f {dir}/state.new {dir}/state; exit $__rl360_code' EXIT; "
    '[ -f {dir}/state ] && . {dir}/state >/dev/null 2>&1; __rl360_command=$1; shift; eval "$__rl360_command"'
).replace("{dir}", STATE_DIR)


class SandboxFileError(Exception):
    """A file cannot be read or written; the text says why, for the model to read."""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    output: str  # standard output and error as they came; a marker stands where something was left out
    timed_out: bool = False


class Shell:
    """One agent's shell in one sandbox.

    Args:
        environment: the Harbor environment; commands run as its default user.
        timeout_s: of one command.
        max_output_bytes: of one command's output that is shown; half from the beginning, half from the end.
    """

    def __init__(self, environment: BaseEnvironment, *, timeout_s: float, max_output_bytes: int):
        self._environment = environment
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes

    async def run(self, command: str, max_output_bytes: int | None = None) -> Outcome:
        """Run one bash command. Raises what the environment raises when the sandbox is gone."""
        command = printable(command).replace("\0", "")
        quoted = shlex.quote(command)
        if len(quoted.encode()) > _MAX_QUOTED:
            return Outcome(1, f"the command is too long ({len(command)} characters); write a file in several steps")
        script = _script(quoted, self._timeout_s, max_output_bytes or self._max_output_bytes)
        began = time.monotonic()
        try:
            done = await self._environment.exec(script, timeout_sec=int(self._timeout_s) + _GRACE_S)
        except RuntimeError as error:
            if not timed_out(error):
                raise
            return Outcome(124, "", timed_out=True)
        head, _, output = (done.stdout or "").partition("\n")
        code = small_integer(head, max_digits=3)
        if code is None:  # the policy broke the shell that serves it; what there is, it sees
            return Outcome(done.return_code or 1, f"{done.stdout or ''}{done.stderr or ''}"[: self._max_output_bytes])
        return Outcome(code, output, code in _KILLED and time.monotonic() - began >= self._timeout_s)

    async def read_file(self, path: str) -> bytes:
        """A whole file, as the agent's user. Raises SandboxFileError."""
        name = shlex.quote(path)
        done = await self.run(
            f"if [ -d {name} ]; then echo 'is a folder'; exit 1; fi; "
            f"if [ ! -f {name} ]; then echo 'no such file'; exit 1; fi; "
            f"if [ $(wc -c <{name}) -gt {MAX_FILE_BYTES} ]; then echo 'is too long'; exit 1; fi; base64 <{name}",
            max_output_bytes=2 * MAX_FILE_BYTES,
        )
        if done.code:
            raise SandboxFileError(f"{path}: {done.output.strip() or 'cannot be read'}")
        try:
            return base64.b64decode(done.output)
        except ValueError:  # the policy broke the tool that encodes it
            raise SandboxFileError(f"{path}: cannot be read: the sandbox's base64 does not work") from None

    async def write_file(self, path: str, data: bytes) -> None:
        """Replace a file's content, as the agent's user; folders are made. Raises SandboxFileError."""
        if len(data) > MAX_FILE_BYTES:
            raise SandboxFileError(f"{path}: {len(data)} bytes; at most {MAX_FILE_BYTES} can be written")
        name, text = shlex.quote(path), base64.b64encode(data).decode()
        folder = f'mkdir -p -- "$(dirname -- {name})"'
        if len(text) <= _CHUNK:
            commands = [f"{folder} && printf %s '{text}' | base64 -d >{name}"]
        else:
            parts = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
            file = f"{STATE_DIR}/upload"
            commands = [f"printf %s '{part}' >{'>' if i else ''}{file}" for i, part in enumerate(parts)]
            commands.append(f"{folder} && base64 -d <{file} >{name} && rm -f {file}")
        for command in commands:
            done = await self.run(command)
            if done.code:
                raise SandboxFileError(f"{path}: {done.output.strip() or 'cannot be written'}")


def _script(quoted: str, timeout_s: float, max_bytes: int) -> str:
    """Run the command, then say its exit code on a line of its own and show its output."""
    head, tail = max_bytes - max_bytes // 2, max_bytes // 2
    return (
        f"mkdir -p {STATE_DIR}; "
        f"timeout -k 1 {timeout_s:g} bash -c {shlex.quote(_RESTORE)} bash {quoted} >{STATE_DIR}/out 2>&1 </dev/null; "
        f"c=$?; n=$(wc -c <{STATE_DIR}/out); n=$((n)); echo $c; "
        f"if [ $n -le {max_bytes} ]; then cat {STATE_DIR}/out; else head -c {head} {STATE_DIR}/out; "
        f"printf '\\n[... %d bytes left out ...]\\n' $((n - {max_bytes})); tail -c {tail} {STATE_DIR}/out; fi; "
        f": >{STATE_DIR}/out"
    )
