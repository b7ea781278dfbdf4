"""Try /app/solution.py on a few examples: `python3 /app/examples.py`. The tests try more of them."""

import os
import signal
import traceback

FUNCTION = 'join_with_dash'
EXAMPLES = [
    ((['a', 'b'],), 'a-b'),
    ((['x'],), 'x'),
]

SOLUTION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "solution.py")
TIME_LIMIT_S = 5


def where(error):
    """The last line of the solution that the error went through."""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SOLUTION]
    return f" (line {lines[-1]})" if lines else ""


def shown(error):
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}{where(error)}"[:300]


def too_slow(number, frame):
    raise TimeoutError(f"no answer after {TIME_LIMIT_S} s")


def problem():
    """What is wrong, in one line; None when the examples are right."""
    try:
        with open(SOLUTION) as file:
            source = file.read()
    except FileNotFoundError:
        return "there is no /app/solution.py"
    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(TIME_LIMIT_S)
    space = {"__name__": "solution"}
    try:
        exec(compile(source, SOLUTION, "exec"), space)
    except BaseException as error:
        return shown(error)
    if FUNCTION not in space:
        return f"/app/solution.py does not define {FUNCTION}"
    for arguments, expected in EXAMPLES:
        call = f"{FUNCTION}({', '.join(map(repr, arguments))})"
        try:
            got = space[FUNCTION](*arguments)
        except BaseException as error:
            return f"{call} raised {shown(error)}"
        if got != expected:
            return f"{call} gave {got!r:.100}, expected {expected!r}"
    return None


found = problem()
print(found or "the examples are right")
raise SystemExit(1 if found else 0)
