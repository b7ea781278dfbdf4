"""The tools of the bash agent: bash, view, edit, submit.

In: a tool's name and its arguments as the model wrote them. Out: a `Result` for the model to read. Left to others:
running commands (shell.py), what failures lead to (the agent).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl360.agents.blame import small_integer
from rl360.agents.shell import Outcome, SandboxFileError, Shell

_TYPES: Mapping[str, type] = {"string": str, "integer": int}
_MAX_INTEGER = 10**9


def _tool(name: str, description: str, required: Sequence[str] = (), **properties: tuple[str, str]) -> dict[str, Any]:
    """An OpenAI function tool; `properties` are (type, description) by name."""
    schema = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        "bash",
        "Run a bash command. The working directory and exported variables last until the next command. "
        "There is no terminal: start long-running programs in the background.",
        ["command"],
        command=("string", "the command"),
    ),
    _tool(
        "view",
        "Show a file with line numbers, or list a folder.",
        ["path"],
        path=("string", "file or folder"),
        start_line=("integer", "first line to show, from 1"),
        end_line=("integer", "last line to show"),
    ),
    _tool(
        "edit",
        "Replace one piece of text in a file. An empty old_text makes a new file.",
        ["path", "old_text", "new_text"],
        path=("string", "the file"),
        old_text=("string", "text that stands exactly once in the file"),
        new_text=("string", "what to put in its place"),
    ),
    _tool("submit", "End the work: the task is done."),
)
_PARAMETERS: Mapping[str, Mapping[str, Any]] = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


class MalformedCall(Exception):
    """A call that cannot be run as it was written; the text says what was expected, for the model to read."""


@dataclass(frozen=True, slots=True)
class Result:
    text: str
    ok: bool = True  # False: the tool itself failed; a command that ends with an error is a result like any other


def read_arguments(name: str, text: object) -> dict[str, Any]:
    """The checked arguments of a call. Raises MalformedCall."""
    if name not in _PARAMETERS:
        raise MalformedCall(f"there is no tool {name!r}; expected one of {', '.join(_PARAMETERS)}")
    arguments = text
    if isinstance(text, str):
        try:
            arguments = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise MalformedCall(f"the arguments of {name} are not JSON: {error}") from error
        except RecursionError:
            raise MalformedCall(f"the arguments of {name} are nested too deeply") from None
    if not isinstance(arguments, dict):
        raise MalformedCall(f"the arguments of {name} are not an object")
    properties, required = _PARAMETERS[name]["properties"], _PARAMETERS[name]["required"]
    problems = [f"{key} is missing" for key in required if key not in arguments]
    for key, value in list(arguments.items()):
        if key not in properties:
            problems.append(f"there is no {key}; expected {', '.join(properties) or 'no argument'}")
            continue
        kind = properties[key]["type"]
        if kind == "integer" and isinstance(value, str):  # models that write arguments as plain text
            number = small_integer(value.strip())
            arguments[key] = value = value if number is None else number
        if value is None and key not in required:
            del arguments[key]
        elif not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
            problems.append(f"{key} is not {'a string' if kind == 'string' else 'an integer'}")
        elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
            problems.append(f"{key} is too large; expected at most {_MAX_INTEGER}")
    if problems:
        raise MalformedCall(f"{name}: {'; '.join(problems)}")
    return arguments


def show(outcome: Outcome, timeout_s: float) -> str:
    """An outcome as text for the model."""
    if outcome.timed_out:
        return f"[the command was stopped after {timeout_s:g} s]\n{outcome.output}".rstrip("\n")
    return f"[exit code {outcome.code}]\n{outcome.output}".rstrip("\n")


class Toolbox:
    """The tools on one shell. `submit` does nothing here: it ends the attempt, which is the agent's to do."""

    def __init__(self, shell: Shell, timeout_s: float):
        self._shell, self._timeout_s = shell, timeout_s

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """Run a tool with checked arguments."""
        if name == "bash":
            outcome = await self._shell.run(arguments["command"])
            return Result(show(outcome, self._timeout_s), not outcome.timed_out)
        if name == "view":
            return await self._view(arguments["path"], arguments.get("start_line"), arguments.get("end_line"))
        if name == "edit":
            return await self._edit(arguments["path"], arguments["old_text"], arguments["new_text"])
        return Result("")

    async def _view(self, path: str, start: int | None, end: int | None) -> Result:
        name, first = shlex.quote(path), max(1, start or 1)
        lines = f"{first},{max(first, end) if end is not None else '$'}p"
        done = await self._shell.run(
            f"if [ -d {name} ]; then ls -la -- {name}; elif [ -f {name} ]; then cat -n -- {name} | sed -n '{lines}'; "
            f"else echo 'no such file'; exit 1; fi"
        )
        return Result(f"{path}: {done.output.strip()}", False) if done.code else Result(done.output.rstrip("\n"))

    async def _edit(self, path: str, old: str, new: str) -> Result:
        try:
            if old == "":
                return await self._create(path, new)
            data = await self._shell.read_file(path)
            found = data.count(old.encode("utf-8", "replace"))
            if found != 1:
                return Result(f"{path}: old_text stands {found} times in the file; expected exactly once", False)
            changed = data.replace(old.encode("utf-8", "replace"), new.encode("utf-8", "replace"))
            await self._shell.write_file(path, changed)
        except SandboxFileError as error:
            return Result(str(error), False)
        return Result(f"{path}: changed")

    async def _create(self, path: str, text: str) -> Result:
        exists = await self._shell.run(f"[ -s {shlex.quote(path)} ]")
        if exists.code == 0:
            return Result(f"{path}: is there already; give the old_text to replace", False)
        await self._shell.write_file(path, text.encode("utf-8", "replace"))
        return Result(f"{path}: made")
