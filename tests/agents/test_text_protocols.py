"""The agents without tool calls: one command a turn, and write, check, repair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl360.agents import repair_text
from rl360.agents.bash_text import CUT, NO_BLOCK, ONLY_FIRST, PROTOCOL, BashTextAgent
from rl360.agents.repair_text import ASK, RepairTextAgent
from tests.agents.kit import TOKENS_USED, attempt, completion

SUBMIT = "```bash\nsubmit\n```"


def block(code: str, language: str = "bash") -> str:
    return f"```{language}\n{code}\n```"


def users(endpoint: Any) -> list[str]:
    return [m["content"] for m in endpoint.messages if m["role"] == "user"]


async def test_one_command_a_turn(tmp_path: Path) -> None:
    script = [f"First\n{block('mkdir d; cd d')}", block("pwd | xargs basename; exit 2"), SUBMIT]
    metadata, endpoint, _ = await attempt(BashTextAgent, tmp_path, script, instruction="Make it.\n")
    assert users(endpoint) == [f"Make it.\n\n{PROTOCOL}", "[exit code 0]", "[exit code 2]\nd"]
    assert (metadata["stop"], metadata["format_ok"], metadata["actions"]) == ("finished", True, 2)
    assert "tools" not in endpoint.requests[0]
    assert all(m["role"] != "tool" for m in endpoint.messages)


async def test_replies_without_a_command(tmp_path: Path) -> None:
    script = ["hm", completion("```bash\nls", "length"), block("true"), "hm", SUBMIT]
    metadata, endpoint, _ = await attempt(BashTextAgent, tmp_path, script)
    assert users(endpoint)[1:] == [NO_BLOCK, CUT, "[exit code 0]", NO_BLOCK]
    assert (metadata["stop"], metadata["format_ok"], metadata["format_failures"]) == ("finished", False, 3)


async def test_three_in_a_row_end_it(tmp_path: Path) -> None:
    metadata, endpoint, _ = await attempt(BashTextAgent, tmp_path, ["hm"] * 5)
    assert (metadata["stop"], len(endpoint.requests)) == ("gave_up", 3)


async def test_of_several_commands_the_first_is_run(tmp_path: Path) -> None:
    script = [f"{block('echo 1')}\n{block('echo 2')}", SUBMIT]
    metadata, endpoint, _ = await attempt(BashTextAgent, tmp_path, script)
    assert users(endpoint)[1] == f"[exit code 0]\n1\n{ONLY_FIRST}"
    assert metadata["format_ok"] is False


GOOD = "def double(x):\n    return 2 * x"
INSTRUCTION = "Write a Python function `double(x)` that returns twice x. Reply with one ```python block."


async def repair(folder: Path, script: list[Any], examples: str | None, **kwargs: Any) -> tuple[Any, Any, Any]:
    if examples is not None:
        (folder / "examples.py").write_text(examples)
        kwargs["examples"] = str(folder / "examples.py")
    return await attempt(RepairTextAgent, folder, script, instruction=INSTRUCTION, **kwargs)


EXAMPLES = """
space = {}
exec(open("solution.py").read(), space)
if space["double"](3) != 6:
    print(f"double(3) gave {space['double'](3)}, expected 6")
    raise SystemExit(1)
"""


async def test_see_the_error_and_repair(tmp_path: Path) -> None:
    script = [block("def double(x):\n    return x + 2", "python"), block(GOOD, "python"), "never asked"]
    metadata, endpoint, environment = await repair(tmp_path, script, EXAMPLES)
    assert users(endpoint) == [INSTRUCTION, f"That does not work:\ndouble(3) gave 5, expected 6\n{ASK}"]
    assert (environment.app / "solution.py").read_text() == f"{GOOD}\n"
    assert metadata == {
        "stop": "finished",
        "format_ok": True,
        "turns": 2,
        "format_failures": 0,
        "tool_failures": 0,
        "actions": 2,
        "code_chars": len(GOOD) + 1,
    }


async def test_without_examples_it_must_load_and_define_the_function(tmp_path: Path) -> None:
    script = [
        block("def double(x)\n    return x", "python"),
        block("def twice(x):\n    return 2 * x", "python"),
        "what?",
        f"Here:\n{block(GOOD, 'python')}",
    ]
    metadata, endpoint, _ = await repair(tmp_path, script, None)
    assert users(endpoint)[1:] == [
        f"That does not work:\nSyntaxError: expected ':' (line 1: def double(x))\n{ASK}",
        f"That does not work:\nthere is no function double\n{ASK}",
        f"There was no code block. {ASK}",
    ]
    assert (metadata["stop"], metadata["format_ok"], metadata["format_failures"]) == ("finished", False, 2)


async def test_the_last_solution_stays_when_the_turns_are_used_up(tmp_path: Path) -> None:
    wrong = block("def double(x):\n    return x", "python")
    metadata, endpoint, environment = await repair(tmp_path, [wrong, wrong, TOKENS_USED], EXAMPLES)
    assert (metadata["stop"], len(endpoint.requests)) == ("length", 3)
    assert (environment.app / "solution.py").exists()


async def test_a_solution_that_does_not_end(tmp_path: Path) -> None:
    script = [block("while True: pass", "python"), TOKENS_USED]
    _, endpoint, _ = await repair(tmp_path, script, None, command_timeout_s=0.5)
    assert users(endpoint)[1] == f"That does not work:\nIt did not end within 0.5 s.\n{ASK}"


async def test_a_check_of_the_tasks_own(tmp_path: Path) -> None:
    script = [block("x", "text"), block("y", "text")]
    metadata, endpoint, _ = await repair(
        tmp_path, script, None, check_command="grep -q y /app/answer || { echo no y; false; }", path="/app/answer"
    )
    assert users(endpoint)[1] == f"That does not work:\nno y\n{ASK}"
    assert metadata["stop"] == "finished"


CHECKER = Path(repair_text.__file__).with_name("check_loads.py")


@pytest.mark.parametrize(
    ("solution", "complaint"),
    [
        (GOOD, ""),
        ("print('noise')\ndouble = int", ""),
        ("double = 2", "there is no function double"),
        ("def double(x): return x.\n", "SyntaxError: invalid syntax (line 1: def double(x): return x.)"),
        ("\nimport nothing_like_it\n", "No module named 'nothing_like_it' (line 2: import nothing_like_it)"),
        ("raise SystemExit(0)", "SystemExit: 0 (line 1: raise SystemExit(0))"),
        ("x = y", "NameError: name 'y' is not defined (line 1: x = y)"),
        ("bytes(10**10)", "MemoryError"),
        ("raise ValueError('a' * 500)", f"ValueError: {'a' * 108}..."),
    ],
)
def test_loading_a_solution(tmp_path: Path, solution: str, complaint: str) -> None:
    (tmp_path / "s.py").write_text(solution)
    command = [sys.executable, "-I", "-S", "-B", "-c", CHECKER.read_text(), tmp_path / "s.py", "double"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == (1 if complaint else 0)
    assert complaint in done.stdout
    assert done.stdout.count("\n") == bool(complaint)


def test_the_function_is_the_one_that_the_instruction_names() -> None:
    command = repair_text.check_command("Use `x` in `clamp(x, lo, hi)` or `other(x)`.", "/app/solution.py", "/e")
    assert command.startswith("if [ -f /e ]; then python3 -I -S -B /e; else ")
    assert command.endswith(" /app/solution.py clamp; fi")
    assert repair_text.check_command("No name.", "/s", "/e").endswith(" /s ''; fi")


async def test_the_answers_form_is_asked_for_once(tmp_path: Path) -> None:
    _, endpoint, _ = await attempt(RepairTextAgent, tmp_path, [TOKENS_USED], instruction="Write f.\n")
    assert users(endpoint) == [f"Write f.\n{ASK}"]
