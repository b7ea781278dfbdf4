"""Run a solution against its public examples and complain in one or two lines. Runs inside the sandbox.

In: the solution file, the examples file (it need not exist) and the name of the function to define (may be empty). Out:
exit code 0, or 1 with the first thing that is wrong. Standard library only; what the solution prints is dropped.
"""

import ast
import contextlib
import io
import resource
import sys
import traceback
from typing import Any

MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
MAX_VALUE_CHARS = 120
NAME = "solution.py"


class Complaint(Exception):
    """What is wrong, in words for the model."""


def shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


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


def check_example(statement: ast.stmt, namespace: dict[str, Any], source: str) -> None:
    """One statement of the examples. An `assert a == b` says what a was."""
    text = ast.unparse(statement)
    test = statement.test if isinstance(statement, ast.Assert) else None
    equality = test if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq] else None
    try:
        if equality is None:
            exec(compile(ast.Module([statement], []), "examples.py", "exec"), namespace)
            return
        got, expected = (eval(ast.unparse(side), namespace) for side in (equality.left, equality.comparators[0]))
        same = bool(got == expected)
    except AssertionError:
        raise Complaint(f"{text} is not true") from None
    except BaseException as error:
        call = ast.unparse(equality.left) if equality else text
        raise Complaint(f"{call} failed with {describe(error, source)}") from None
    if not same:
        left = ast.unparse(equality.left)
        raise Complaint(f"{left} returned {shorten(repr(got))}, expected {shorten(repr(expected))}")


def check(solution: str, examples: str, function: str) -> None:
    with open(solution, encoding="utf-8", errors="replace") as file:
        source = file.read()
    namespace: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(source, NAME, "exec"), namespace)
    except BaseException as error:
        raise Complaint(describe(error, source)) from None
    if function and not callable(namespace.get(function)):
        raise Complaint(f"there is no function {function}")
    try:
        with open(examples, encoding="utf-8") as file:
            statements = ast.parse(file.read()).body
    except FileNotFoundError:
        return
    for statement in statements:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            check_example(statement, namespace, source)


def main(arguments: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check(*arguments)
    except Complaint as complaint:
        print(complaint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
