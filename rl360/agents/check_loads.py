"""Load a solution and complain in one line when that fails. Runs inside the sandbox, for tasks without public examples.

In: the solution file and the name of the function that it has to define (may be empty). Out: exit code 0, or 1 with
what is wrong. Standard library only; what the solution prints is dropped.
"""

import contextlib
import io
import resource
import sys
import traceback
from typing import Any

MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
MAX_CHARS = 120
NAME = "solution.py"


def shorten(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."


def describe(error: BaseException, source: str) -> str:
    """An exception in one line, with the line of the solution that it came from."""
    text = shorten(f"{type(error).__name__}: {error}")
    if isinstance(error, SyntaxError) and error.filename == NAME:
        number = error.lineno or 0
        text = f"{type(error).__name__}: {error.msg}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
        number = (frames[-1].lineno or 0) if frames else 0
    lines = source.splitlines()
    if 0 < number <= len(lines):
        text += f" (line {number}: {shorten(lines[number - 1].strip())})"
    return text


def complaint(solution: str, function: str) -> str | None:
    with open(solution, encoding="utf-8", errors="replace") as file:
        source = file.read()
    namespace: dict[str, Any] = {"__name__": "solution"}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(source, NAME, "exec"), namespace)
    except BaseException as error:
        return describe(error, source)
    if function and not callable(namespace.get(function)):
        return f"there is no function {function}"
    return None


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    found = complaint(sys.argv[1], sys.argv[2])
    if found:
        print(found)
    sys.exit(1 if found else 0)
