"""Write the two bundled pools of small coding tasks from pool.jsonl.

In: pool.jsonl (instruction, tests as `call==value`, a right solution, measured pass rates of SmolLM2-135M-Instruct over
8 samples), grader.py and examples.py, beside this file. Out: two pools in rl360/tasks/bundled: small_coding, and
small_coding_repair, the same with /app/examples.py, which says what is wrong with an answer; each has one Harbor task
folder a row, and the manifests. Run it after changing any; tests/tasks/test_bundled.py fails when the folders are not
what this writes.

    python scripts/small_coding/build.py [FOLDER]
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "rl360" / "tasks" / "bundled"
POOL, REPAIR_POOL = "small_coding", "small_coding_repair"

# Pass rates at temperature 1 near a third and far higher at 0.7: the model knows them and has to learn to be sure.
# Solved 0.22 to 0.28 of the time at first (32 attempts each, temperature 1, 64 new tokens): room to learn, and a start.
QUICKSTART = ("arithmetic-average", "arithmetic-half", "logic-is_positive", "strings-to_upper")
# Never trained on in quickstart; alike in kind, so that what is learned can show. 0.19 to 0.44 at first.
QUICKSTART_EVAL = ("arithmetic-abs_diff", "arithmetic-last_digit", "arithmetic-rectangle_area", "dicts-has_key")

TASK_TOML = """\
schema_version = "1.4"

[metadata]
category = "{tag}"
difficulty = "easy"
pass_rate_t1 = {rate_1}  # of SmolLM2-135M-Instruct, 8 samples{note}
pass_rate_t07 = {rate_07}

[environment]
build_timeout_sec = 120.0
network_mode = "no-network"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0
"""

DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /app
"""
REPAIR_DOCKERFILE = DOCKERFILE + "COPY examples.py /app/examples.py\n"

MAX_EXAMPLES = 2  # fewer than a task has cases, so that the examples are never all of the tests

TEST_SH = """\
#!/bin/sh
# The reward is 0 until the grader says otherwise. -I -S: nothing that the agent installed is imported.
PATH=/usr/local/bin:/usr/bin:/bin:/opt/python/bin
export PATH
mkdir -p /logs/verifier
exec python3 -I -S -B /tests/test_solution.py /app/solution.py /logs/verifier/reward.txt
"""

SOLVE_SH = """\
#!/bin/sh
cat >/app/solution.py <<'SOLUTION'
{solution}SOLUTION
"""

CASES_PY = '''\
"""What the function is called with, and what it has to return."""

FUNCTION = {function!r}
CASES = [
{cases}]
'''


def task_id(row: dict[str, Any]) -> str:
    return str(row["id"]).replace("/", "-")


def parse_test(test: str) -> tuple[str, tuple[Any, ...], Any]:
    """`f(1, 2)==3` or `f(1) is None` -> ("f", (1, 2), 3)."""
    comparison = ast.parse(test, mode="eval").body
    assert isinstance(comparison, ast.Compare), test
    call = comparison.left
    assert isinstance(call, ast.Call), test
    assert isinstance(call.func, ast.Name), test
    arguments = tuple(ast.literal_eval(argument) for argument in call.args)
    return call.func.id, arguments, ast.literal_eval(comparison.comparators[0])


def write_task(row: dict[str, Any], folder: Path, repair: bool) -> None:
    tests = [parse_test(test) for test in row["tests"]]
    cases = "".join(f"    ({arguments!r}, {expected!r}),\n" for _, arguments, expected in tests)
    files = {
        "instruction.md": row["instruction"] + "\n",
        "task.toml": TASK_TOML.format(
            tag=row["id"].split("/")[0],
            rate_1=row["pass_rate_t1.0"],
            rate_07=row["pass_rate_t0.7"],
            note=" of one reply" if repair else "",
        ),
        "environment/Dockerfile": REPAIR_DOCKERFILE if repair else DOCKERFILE,
        "tests/test.sh": TEST_SH,
        "tests/test_solution.py": (HERE / "grader.py").read_text(encoding="utf-8"),
        "tests/cases.py": CASES_PY.format(function=tests[0][0], cases=cases),
        "solution/solve.sh": SOLVE_SH.format(solution=row["solution"]),
    }
    if repair:
        shown = tests[: min(MAX_EXAMPLES, len(tests) - 1)]
        lines = [f"assert {name}({', '.join(map(repr, given))}) == {expected!r}\n" for name, given, expected in shown]
        files["environment/examples.py"] = (HERE / "examples.py").read_text(encoding="utf-8") + "".join(lines)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if name.endswith(".sh") else 0o644)


def manifest_row(row: dict[str, Any], repair: bool) -> str:
    tags = [row["id"].split("/")[0], "coding", *(["multi_turn"] if repair else [])]
    metadata = {"instance_id": task_id(row), "tags": tags}
    return json.dumps({"prompt": row["instruction"], "metadata": metadata}) + "\n"


def build(target: Path) -> None:
    """Write both pools into `target`, replacing what is there."""
    rows = [json.loads(line) for line in (HERE / "pool.jsonl").read_text(encoding="utf-8").splitlines()]
    by_id = {task_id(row): row for row in rows}
    assert len(by_id) == len(rows), "two rows share an id"
    manifests = {
        "harbor_records.jsonl": tuple(by_id),
        "overfit32.jsonl": tuple(name for name, row in by_id.items() if row["overfit32"]),
        "quickstart.jsonl": QUICKSTART,
        "quickstart_eval.jsonl": QUICKSTART_EVAL,
    }
    for pool in (POOL, REPAIR_POOL):
        repair = pool == REPAIR_POOL
        shutil.rmtree(target / pool, ignore_errors=True)
        for name, row in by_id.items():
            write_task(row, target / pool / name, repair)
        for name, ids in manifests.items():
            if not (repair and name.startswith("quickstart")):
                lines = [manifest_row(by_id[i], repair) for i in ids]
                (target / pool / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
