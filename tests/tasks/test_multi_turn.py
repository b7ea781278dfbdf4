"""The multi-turn tasks: what is common is what the script writes, and the grader judges as it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rl360
from rl360.tasks import load_tasks
from tests.tasks.test_bundled import SANDBOX_PYTHON, files_of

BUNDLED = Path(rl360.__file__).parent / "tasks" / "bundled"
POOL = BUNDLED / "multi_turn"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "multi_turn" / "build.py"
TASKS = [task.task_id for task in load_tasks(POOL)]


@pytest.mark.skipif(not SCRIPT.exists(), reason="the script is in a checkout only")
def test_the_common_parts_are_what_the_script_writes(tmp_path: Path) -> None:
    for pool in ("multi_turn", "template"):
        shutil.copytree(
            BUNDLED / pool, tmp_path / pool, ignore=shutil.ignore_patterns("validation.json", "__pycache__")
        )
        for generated in ("task.toml", "Dockerfile", "grading.py", "test.sh", "harbor_records.jsonl"):
            for path in (tmp_path / pool).rglob(generated):
                path.unlink()
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True)
    for pool in ("multi_turn", "template"):
        names = files_of(BUNDLED / pool)
        assert files_of(tmp_path / pool) == names
        for name in names:
            ours, written = BUNDLED / pool / name, tmp_path / pool / name
            assert ours.read_bytes() == written.read_bytes(), name
            assert os.access(ours, os.X_OK) == os.access(written, os.X_OK), name


def test_eight_tasks_of_several_kinds_with_chat_prompts() -> None:
    tasks = load_tasks(POOL)
    assert len(tasks) == 8
    assert {task.domain for task in tasks} == {"debugging", "config", "data", "cli"}
    rows = [json.loads(line) for line in (POOL / "harbor_records.jsonl").read_text().splitlines()]
    for task, row in zip(tasks, rows, strict=True):
        text = (task.path / "instruction.md").read_text().strip()
        assert row["prompt"] == [{"role": "user", "content": text}]
        assert "multi_turn" in task.tags
        assert len(task.tags) >= 3


@pytest.fixture
def stage() -> Iterator[Path]:
    """app/, tests/ and logs/ of a task, in a folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="rl360-grading-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "logs").mkdir()
        yield folder


def lay_out(task_id: str, stage: Path, pool: Path = POOL) -> None:
    shutil.copytree(pool / task_id / "environment" / "app", stage / "app")
    shutil.copytree(pool / task_id / "tests", stage / "tests")


def grade(stage: Path, uid: int | None = None) -> tuple[str, str]:
    reward = stage / "logs" / "reward.txt"
    script = stage / "tests" / "grading.py"
    command = [SANDBOX_PYTHON, "-I", "-S", "-B", str(script), str(stage / "app"), str(reward)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, user=uid)
    return reward.read_text(), done.stdout + done.stderr


def solve(task_id: str, stage: Path, pool: Path = POOL) -> None:
    script = (pool / task_id / "solution" / "solve.sh").read_text()
    subprocess.run(["bash", "-c", script.replace("/app", f"{stage}/app")], check=True, capture_output=True)


@pytest.mark.parametrize("task_id", TASKS)
def test_the_oracle_scores_one_and_nothing_scores_zero(task_id: str, stage: Path) -> None:
    lay_out(task_id, stage)
    reward, said = grade(stage)
    assert reward == "0\n", said
    solve(task_id, stage)
    assert grade(stage) == ("1\n", "reward 1: every check passed\n")


# A right answer with one change that must not pass: task -> (file, what stands there, what stands instead).
NEARLY_RIGHT = {
    "fix-interval-merge": ("intervals/merge.py", "max(result[-1][1], end)", "end"),
    "fix-csv-report": ("report.py", '.replace(",", "")', ""),
    "fix-todo-cli": ("todo.py", "return 1\n", "return 0\n"),
    "fix-rotate-script": ("rotate.sh", 'rm -- "$file"', 'rm "$file"'),
    "edit-service-config": ("service.ini", "# seconds\n", ""),
    "migrate-json-config": ("config.v2.json", "7000", '"7000"'),
    "count-log-errors": ("summary.json", '"top_client": "10.', '"top_client": " 10.'),
    "use-inventory-tool": ("export.csv", "number,shelf,quantity,name", "number,shelf,name,quantity"),
}


@pytest.mark.parametrize("task_id", TASKS)
def test_a_nearly_right_answer_scores_zero(task_id: str, stage: Path) -> None:
    lay_out(task_id, stage)
    solve(task_id, stage)
    name, before, after = NEARLY_RIGHT[task_id]
    path = stage / "app" / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    reward, said = grade(stage)
    assert reward == "0\n", said


HOSTILE = {
    "ends well at once": "import os\nos._exit(0)\n",
    "prints every number": "for n in range(100):\n    print(n)\n",
    "endless output": "while True:\n    print('1' * 10000)\n",
    "all memory": "x = [0] * 10**10\n",
    "writes the reward": (
        "open(REWARD, 'w').write('1')\nopen(REWARD.replace('txt', 'json'), 'w').write('{\"reward\": 1}')\n"
    ),
    "kills the grader": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "reads the checks": "exec(open(CHECKS).read())\nprint(list(TEXTS.values())[0])\n",
    "leaves a process": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.3)\n"
        "        open(MARK, 'w').write('still here')\n"
        "        os._exit(0)\n"
        "os._exit(0)\n"
    ),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run the answer as another user")
def test_hostile_answers_score_zero(name: str, stage: Path) -> None:
    lay_out("count-words", stage, BUNDLED / "template")
    (stage / "tests").chmod(0o700)  # as the grader itself leaves it where it lies at /tests
    (stage / "open").mkdir(mode=0o777)
    (stage / "open").chmod(0o777)
    reward = stage / "logs" / "reward.txt"
    mark, checks = stage / "open" / "mark", stage / "tests" / "checks.py"
    paths = f"REWARD, MARK, CHECKS = {str(reward)!r}, {str(mark)!r}, {str(checks)!r}\n"
    (stage / "app" / "count_words.py").write_text(paths + HOSTILE[name])
    got, said = grade(stage)
    assert got == "0\n", said
    assert not reward.with_suffix(".json").exists()
    if name == "leaves a process":
        time.sleep(0.5)
        assert not mark.exists()


SIGNALS = (
    "import os, signal\n"
    "done = []\n"
    "for name in ('grader', 'session'):\n"
    "    try:\n"
    "        os.kill(os.getppid() if name == 'grader' else 0, signal.SIGKILL)\n"
    "        done.append(name)\n"
    "    except PermissionError: pass\n"
    "import fcntl, resource\n"
    "for name, call in (\n"
    "    ('owner', lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())),\n"
    "    ('limit', lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))),\n"
    "):\n"
    "    try:\n"
    "        call()\n"
    "        done.append(name)\n"
    "    except PermissionError: pass\n"
    "fcntl.fcntl(0, fcntl.F_GETFL)\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"
    "print(done)\n"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user first")
@pytest.mark.parametrize("name", ["writes the reward", "kills the grader", "leaves a process"])
def test_with_one_user_the_answer_cannot_end_its_grader(name: str, stage: Path) -> None:
    """As in a sandbox with a single user: the answer may write the reward file, and the grader writes it last."""
    lay_out("count-words", stage, BUNDLED / "template")
    reward, mark = stage / "logs" / "reward.txt", stage / "logs" / "mark"
    paths = f"REWARD, MARK = {str(reward)!r}, {str(mark)!r}\n"
    wrong = "import os\nos.system('true')\n"
    (stage / "app" / "count_words.py").write_text(wrong + paths + HOSTILE[name] + HOSTILE["writes the reward"])
    for folder, _, files in os.walk(stage):
        for file in (".", *files):
            os.chown(Path(folder) / file, 65533, 65533)
    got, said = grade(stage, uid=65533)
    assert got == "0\n", said
    assert not reward.with_suffix(".json").exists()
    time.sleep(0.5)
    assert not mark.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user first")
def test_what_the_filter_refuses_and_leaves(stage: Path) -> None:
    lay_out("count-words", stage, BUNDLED / "template")
    (stage / "app" / "count_words.py").write_text(SIGNALS)
    for folder, _, files in os.walk(stage):
        for file in (".", *files):
            os.chown(Path(folder) / file, 65533, 65533)
    got, said = grade(stage, uid=65533)
    assert got == "0\n"
    assert "got [0, '[]\\n']" in said


@pytest.mark.slow
def test_an_answer_that_hangs_is_cut(stage: Path) -> None:
    lay_out("count-words", stage, BUNDLED / "template")
    (stage / "app" / "count_words.py").write_text("import time\ntime.sleep(1000)\n")
    began = time.monotonic()
    reward, said = grade(stage)
    assert reward == "0\n"
    assert "got [None, '']" in said
    assert time.monotonic() - began < 60


def test_links_are_no_answer(stage: Path) -> None:
    lay_out("count-words", stage, BUNDLED / "template")
    right = stage / "right.py"
    right.write_text("import sys\nprint(len(sys.stdin.read().split()))\n")
    (stage / "app" / "count_words.py").symlink_to(right)
    assert grade(stage)[0] == "0\n"
    lay_out_again = stage / "app" / "count_words.py"
    lay_out_again.unlink()
    shutil.copy(right, lay_out_again)
    assert grade(stage)[0] == "1\n"


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize("pool", ["multi_turn", "template"])
def test_the_pool_validates_in_the_local_sandbox(pool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rl360.cli import main

    report = tmp_path / "report.json"
    command = ["tasks", "validate", pool, "--report", str(report), f"paths.cache={tmp_path / 'cache'}"]
    assert main(command) == 0, capsys.readouterr().out
    verdicts = {name: row["verdict"] for name, row in json.loads(report.read_text())["tasks"].items()}
    assert set(verdicts.values()) == {"valid"}
    assert len(verdicts) == len(load_tasks(BUNDLED / pool))
