"""The bundled pools of small functions: as their script writes them; right answers score 1, and nothing else does."""

from __future__ import annotations

import ast
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rl360
from rl360.tasks import load_tasks

POOL = Path(rl360.__file__).parent / "tasks" / "bundled" / "small_coding"
REPAIR_POOL = POOL.with_name("small_coding_repair")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "small_coding"
# What a sandbox has; of the host's, the one that a view of /usr shows. It may be older than ours.
SANDBOX_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
UNPRIVILEGED_UID = 65533  # neither root nor the grader's nobody

ROWS = [json.loads(line) for line in (SCRIPTS / "pool.jsonl").read_text().splitlines()] if SCRIPTS.is_dir() else []
TASK_IDS = [row["id"].replace("/", "-") for row in ROWS]

WRONG_OR_CHEATING = {
    "no file": None,
    "empty": "",
    "syntax error": "def square(n) return n",
    "other name": "def sqare(n):\n    return n * n\n",
    "wrong": "def square(n):\n    return n * 2\n",
    "right for two of three": "def square(n):\n    return 25 if n == 5 else 9\n",
    "raises": "def square(n):\n    raise ValueError(n)\n",
    "prints instead": "def square(n):\n    print(n * n)\n",
    "exits on import": "def square(n):\n    return n * n\nimport sys\nsys.exit(0)\n",
    "exits hard": "import os\ndef square(n):\n    os._exit(0)\n",
    "segmentation fault": "import ctypes\ndef square(n):\n    return ctypes.string_at(0)\n",
    "deep recursion": "def square(n):\n    return square(n)\n",
    "endless loop": "def square(n):\n    while True:\n        pass\n",
    "all memory": "def square(n):\n    return len([0] * 10**10)\n",
    "much output": "def square(n):\n    while True:\n        print('1' * 10**6)\n",
    "endless reply": "def square(n):\n    return 'x' * 10**8\n",
    "reads from the user": "def square(n):\n    return int(input())\n",
    "equal to everything": "class E:\n    def __eq__(self, other): return True\ndef square(n):\n    return E()\n",
    "equal int": "class E(int):\n    def __eq__(self, other): return True\ndef square(n):\n    return E(1)\n",
    "answers for the grader": (
        "import json, os\n"
        "for fd in range(3, 30):\n"
        "    try: os.write(fd, json.dumps({'replies': [['value', True]] * 3}).encode())\n"
        "    except OSError: pass\n"
        "os._exit(0)\n"
    ),
    "malformed answer": (
        "import os\nfor fd in range(3, 30):\n    try: os.write(fd, b'[[')\n    except OSError: pass\nos._exit(0)\n"
    ),
    "patched json": "import json\njson.dumps = lambda *a: '{\"replies\": []}'\ndef square(n):\n    return 0\n",
    "writes the reward": (
        "import os, glob\n"
        "for path in [REWARD, REWARD.replace('.txt', '.json')]:\n"
        "    try:\n"
        "        open(path, 'w').write('1')\n"
        "    except OSError: pass\n"
        "os._exit(0)\n"
    ),
    "links the reward": (
        "import os\n"
        "try:\n"
        "    os.unlink(REWARD)\n"
        "    os.symlink('/sys/module/overlay/parameters/check_copy_up', REWARD)\n"
        "except OSError: pass\n"
        "os._exit(0)\n"
    ),
    "a folder for the reward": (
        "import os\ntry:\n    os.unlink(REWARD)\n    os.mkdir(REWARD)\nexcept OSError: pass\nos._exit(0)\n"
    ),
    "kills the grader": (
        "import os, signal, time\n"
        "try: os.kill(os.getppid(), signal.SIGKILL)\n"
        "except OSError: pass\n"
        "time.sleep(0.05)\n"
        "open(REWARD, 'w').write('1')\n"
    ),
    "leaves a process behind": (
        "import os, time\n"
        "try:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        os.closerange(0, 50)\n"
        "        time.sleep(0.1)\n"
        "        open(REWARD, 'w').write('1')\n"
        "        os._exit(0)\n"
        "except OSError: pass\n"
        "def square(n):\n    return 0\n"
    ),
    "a thread that stays": (
        "import threading, time\n"
        "def run():\n    time.sleep(60)\n"
        "def square(n):\n    threading.Thread(target=run).start()\n    return 0\n"
    ),
    "reads the cases": (
        "ns = {}\n"
        "exec(open(TESTS + '/cases.py').read(), ns)\n"
        "answers = {a: e for a, e in ns['CASES']}\n"
        "def square(*a):\n    return answers[a]\n"
    ),
}


@pytest.fixture
def stage() -> Iterator[Path]:
    """A folder that another user may enter, unlike pytest's own: app/, logs/ and a copy of a task's tests/."""
    with tempfile.TemporaryDirectory(prefix="rl360-grader-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "app").mkdir()
        (folder / "logs" / "verifier").mkdir(parents=True)
        yield folder


def write_solution(stage: Path, source: str | None, reward: Path, tests: str) -> None:
    if source is not None:
        names = f"REWARD = {str(reward)!r}\nTESTS = {tests!r}\n"
        (stage / "app" / "solution.py").write_text(names + source)


def run_grader(task_id: str, stage: Path, source: str | None, *, uid: int | None = None) -> tuple[str, str]:
    """Run the tests where they lie, without a sandbox. Returns the reward file's text and the grader's line."""
    shutil.copytree(POOL / task_id / "tests", stage / "tests")
    reward = stage / "logs" / "verifier" / "reward.txt"
    write_solution(stage, source, reward, str(stage / "tests"))
    if uid is not None:
        os.chown(stage / "logs" / "verifier", uid, uid)
    script, solution = stage / "tests" / "test_solution.py", stage / "app" / "solution.py"
    command = [SANDBOX_PYTHON, "-I", "-S", "-B", str(script), str(solution), str(reward)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, user=uid)
    if "sleep(0." in (source or ""):
        time.sleep(0.3)  # what was left behind acts within 0.1 s
    return reward.read_text(), done.stdout + done.stderr


def run_in_bubblewrap(task_id: str, stage: Path, source: str | None, *, uid: int | None = None) -> str:
    """Run tests/test.sh at the paths of a trial, in the host's /usr and nothing else."""
    shutil.copytree(POOL / task_id / "tests", stage / "tests")
    write_solution(stage, source, Path("/logs/verifier/reward.txt"), "/tests")
    if uid is not None:
        for folder, names, files in os.walk(stage):
            for name in (".", *names, *files):
                os.chown(Path(folder) / name, uid, uid)
    command = ["bwrap", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--unshare-pid"]
    command += ["--unshare-net", "--unshare-ipc"] + (["--unshare-user"] if uid is not None else [])
    for name in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{name}", f"/{name}"]
    for name in ("app", "logs", "tests"):
        command += ["--bind", str(stage / name), f"/{name}"]
    command += ["sh", "/tests/test.sh"]
    subprocess.run(command, capture_output=True, timeout=60, check=False, user=uid)
    return (stage / "logs" / "verifier" / "reward.txt").read_text()


@pytest.mark.skipif(not ROWS, reason="the pools' script is in a checkout only")
def test_the_pools_are_what_their_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / "build.py"), str(tmp_path)], check=True)
    for pool in (POOL, REPAIR_POOL):
        written = tmp_path / pool.name
        names = files_of(written)
        assert names == files_of(pool)
        _, different, unreadable = filecmp.cmpfiles(written, pool, names, shallow=False)
        assert (different, unreadable) == ([], [])
    assert os.access(POOL / "lists-lengths" / "tests" / "test.sh", os.X_OK)


def files_of(pool: Path) -> list[str]:
    """Relative paths of a pool, but for caches and the reports of `rl360 tasks validate`."""
    files = (path.relative_to(pool) for path in pool.rglob("*") if path.is_file())
    return sorted(str(f) for f in files if "__pycache__" not in f.parts and f.name != "validation.json")


def test_the_pools_sizes() -> None:
    assert len(load_tasks(POOL)) == 62
    assert [task.task_id for task in load_tasks(REPAIR_POOL)] == [task.task_id for task in load_tasks(POOL)]
    for pool in (POOL, REPAIR_POOL):
        few = load_tasks(pool / "overfit32.jsonl")
        assert len(few) == 32
        assert {task.domain for task in few} == {"arithmetic", "dicts", "lists", "logic", "strings"}
    train = {t.task_id for t in load_tasks(POOL / "quickstart.jsonl")}
    held_out = {t.task_id for t in load_tasks(POOL / "quickstart_eval.jsonl")}
    assert len(train) == len(held_out) == 4
    assert not train & held_out


def test_every_bundled_task_shares_one_environment() -> None:
    """One image layer for the whole pool: the local sandbox caches it by content."""
    dockerfiles = {(POOL / task_id / "environment" / "Dockerfile").read_text() for task_id in TASK_IDS}
    assert dockerfiles == {"FROM python:3.12-slim\nWORKDIR /app\n"}


def test_every_bundled_task_is_one_that_harbor_takes() -> None:
    task_config = pytest.importorskip("harbor.models.task.config")
    for task in load_tasks(POOL):
        config = task_config.TaskConfig.model_validate_toml((task.path / "task.toml").read_text())
        assert config.environment.network_mode.value == "no-network"
        assert config.verifier.timeout_sec == 60.0


@pytest.mark.parametrize("row", ROWS, ids=TASK_IDS)
def test_the_right_answer_scores_one(row: dict[str, str], stage: Path) -> None:
    reward, said = run_grader(row["id"].replace("/", "-"), stage, row["solution"])
    assert (reward, said) == ("1\n", "reward 1: every case passed\n")


def test_the_oracle_writes_the_right_answer(stage: Path) -> None:
    script = (POOL / "logic-fizzbuzz" / "solution" / "solve.sh").read_text()
    solution = next(row["solution"] for row in ROWS if row["id"] == "logic/fizzbuzz")
    subprocess.run(["sh", "-c", script.replace("/app/", f"{stage}/app/")], check=True)
    assert (stage / "app" / "solution.py").read_text() == solution


@pytest.mark.parametrize("name", [name for name in WRONG_OR_CHEATING if name != "reads the cases"])
def test_everything_else_scores_zero(name: str, stage: Path) -> None:
    reward, said = run_grader("arithmetic-square", stage, WRONG_OR_CHEATING[name])
    assert reward == "0\n", said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "name",
    ["writes the reward", "links the reward", "a folder for the reward", "kills the grader", "leaves a process behind"],
)
def test_the_limits_hold_without_root_too(name: str, stage: Path) -> None:
    """The solution is then the same user as the grader: the limits on files, processes and signals are what is left."""
    reward, said = run_grader("arithmetic-square", stage, WRONG_OR_CHEATING[name], uid=UNPRIVILEGED_UID)
    assert reward == "0\n", said


@pytest.mark.sandbox
@pytest.mark.parametrize("uid", [None, UNPRIVILEGED_UID])
@pytest.mark.parametrize(
    "name", ["reads the cases", "writes the reward", "links the reward", "kills the grader", "leaves a process behind"]
)
def test_cheats_at_the_paths_of_a_trial(name: str, uid: int | None, stage: Path) -> None:
    if uid is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reward = run_in_bubblewrap("arithmetic-square", stage, WRONG_OR_CHEATING[name], uid=uid)
    assert reward == "0\n"


@pytest.mark.sandbox
@pytest.mark.parametrize("uid", [None, UNPRIVILEGED_UID])
def test_the_right_answer_at_the_paths_of_a_trial(uid: int | None, stage: Path) -> None:
    if uid is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    source = "import math\nfrom typing import List\ndef square(n):\n    return int(math.pow(n, 2))\n"
    assert run_in_bubblewrap("arithmetic-square", stage, source, uid=uid) == "1\n"


@pytest.mark.slow
def test_a_sleeping_solution_scores_zero(stage: Path) -> None:
    reward, said = run_grader("arithmetic-square", stage, "import time\ndef square(n):\n    time.sleep(100)\n")
    assert reward == "0\n"
    assert "no reply" in said


@pytest.mark.parametrize(
    ("task_id", "source"),
    [
        ("dicts-count_letters", "from collections import Counter\ndef count_letters(s):\n    return Counter(s)\n"),
        (
            "dicts-get_value",
            "def get_value(d, key):\n    try:\n        return d[key]\n    except KeyError:\n        pass\n",
        ),
        ("arithmetic-average", "from statistics import mean\ndef average(a, b):\n    return mean([a, b])\n"),
        ("arithmetic-double", "def double(x):\n    return float(x + x)\n"),
    ],
)
def test_other_right_answers_count(task_id: str, source: str, stage: Path) -> None:
    reward, said = run_grader(task_id, stage, source)
    assert reward == "1\n", said


def test_a_tuple_is_not_a_list(stage: Path) -> None:
    reward, said = run_grader("lists-reverse_list", stage, "def reverse_list(xs):\n    return tuple(xs[::-1])\n")
    assert reward == "0\n"
    assert "wrong value (3, 2, 1)" in said


def try_examples(task_id: str, stage: Path, source: str | None) -> tuple[int, str]:
    """Run examples.py of the repair pool beside a solution, as an agent would."""
    shutil.copy(REPAIR_POOL / task_id / "environment" / "examples.py", stage / "app" / "examples.py")
    if source is not None:
        (stage / "app" / "solution.py").write_text(source)
    command = [SANDBOX_PYTHON, "-B", str(stage / "app" / "examples.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "/app/solution.py: FileNotFoundError: [Errno 2] No such file or directory: 'PATH'"),
        ("def square(n):\n    return n = n", "/app/solution.py: SyntaxError: invalid syntax (line 2)"),
        (
            "x = 1\nimport nothing_there",
            "/app/solution.py: ModuleNotFoundError: No module named 'nothing_there' (line 2)",
        ),
        ("def sqare(n):\n    return n * n", "square(5): NameError: name 'square' is not defined"),
        ("def square(n):\n    return n + n", "square(5) gave 10, expected 25"),
        ("def square(n):\n    m = 2\n    return m * k", "square(5): NameError: name 'k' is not defined (line 3)"),
        ("import sys\nsys.exit(0)", "/app/solution.py: SystemExit: 0 (line 2)"),
    ],
)
def test_examples_say_what_is_wrong(source: str | None, said: str, stage: Path) -> None:
    said = said.replace("PATH", str(stage / "app" / "solution.py"))
    assert try_examples("arithmetic-square", stage, source) == (1, said + "\n")


@pytest.mark.parametrize("row", ROWS, ids=TASK_IDS)
def test_examples_take_the_right_answer_and_are_not_all_of_the_tests(row: dict[str, str], stage: Path) -> None:
    task_id = row["id"].replace("/", "-")
    assert try_examples(task_id, stage, row["solution"]) == (0, "the examples are right\n")
    program = ast.parse((REPAIR_POOL / task_id / "environment" / "examples.py").read_text())
    shown = [ast.unparse(node.test) for node in program.body if isinstance(node, ast.Assert)]
    cases: dict[str, Any] = {}
    exec((REPAIR_POOL / task_id / "tests" / "cases.py").read_text(), cases)
    calls = [f"{cases['FUNCTION']}({', '.join(map(repr, given))}) == {want!r}" for given, want in cases["CASES"]]
    assert shown == [ast.unparse(ast.parse(call)) for call in calls[: len(shown)]]
    assert 1 <= len(shown) < len(calls)


@pytest.mark.slow
def test_examples_end(stage: Path) -> None:
    source = "def square(n):\n    while True:\n        n = 0\n"
    code, said = try_examples("arithmetic-square", stage, source)
    assert code == 1
    assert said.startswith("square(5): TimeoutError: no answer after 5 s (line ")
