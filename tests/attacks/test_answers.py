"""Attacks from inside the artifacts: an answer that attacks the test that runs it, on the bundled pool's grader.

No sandbox can tell these from the tests' own doing; the grader can, because it runs the answer as another user in a
process without the expected values. tests/tasks/test_bundled.py has more of them, without trials.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

import rl360.tasks
from rl360.types import Task
from tests.attacks import kit

pytestmark = pytest.mark.sandbox

_WRITE = "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')"
ANSWERS = {
    "exits": "import os\nos._exit(0)",
    "writes-the-reward": f"{_WRITE}\ndef double(x): return 0",
    "stays-and-writes": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  while True:\n    try: "
        f"{_WRITE}\n    except OSError: time.sleep(0.01)\ndef double(x): return 0"
    ),
    "kills-its-parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef double(x): return 0",
    "kills-everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef double(x): return 0",
    "reads-the-cases": "exec(open('/tests/cases.py').read())\ndef double(x): return dict(CASES)[(x,)]",
    "equals-everything": (
        "class Any(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
        "def double(x): return Any(0)"
    ),
    "not-a-number": "def double(x): return float('nan')",
    "prints-a-verdict": "import sys\nsys.stdout.write('{\"reward\": 1}')\ndef double(x): return 0",
    "never-returns": "def double(x):\n  while True: pass",
    "takes-all-memory": "x = bytearray(2**34)\ndef double(x): return 0",
    "forks": "import os\nwhile True: os.fork()",
    "odd-bytes": "# \\udcff \\x00\ndef double(x): return '\\u0661'",
}


async def test_an_answer_that_attacks_the_test_scores_zero(tmp_path: Path, cache: Path) -> None:
    folder = Path(rl360.tasks.__file__).parent / "bundled/small_coding/arithmetic-double"
    scripts = {name: f"cat > /app/solution.py <<'ANSWER'\n{code}\nANSWER" for name, code in ANSWERS.items()}
    helpers = {
        # Files beside the answer, which come along too.
        "files-beside-it": (
            "cd /app; for n in sitecustomize usercustomize conftest json os re resource select; do "
            f"echo \"{_WRITE.replace(chr(34), chr(92) + chr(34))}\" > $n.py; done; echo 'import json' > solution.py"
        ),
        "environment-beside-it": "cd /app; printf 'PYTHONPATH=/app' > .env; echo '[pytest]' > pytest.ini; mkdir .git",
    }
    task = Task("double", folder, ("arithmetic",), "")
    controls = {"oracle": (folder / "solution/solve.sh").read_text(), "nothing": "true"}
    results = await kit.attack(task, {**scripts, **helpers, **controls}, tmp_path, cache)
    expected = {**dict.fromkeys([*scripts, *helpers, "nothing"], 0.0), "oracle": 1.0}
    assert kit.scores(results) == expected


BUNDLED = Path(rl360.tasks.__file__).parent / "bundled"
SLOW = "import time\ntime.sleep(1.5)\n"


@pytest.mark.parametrize("pool", ["multi_turn/fix-interval-merge", "small_coding/arithmetic-double"])
def test_an_answer_cannot_make_the_verifier_time_out(pool: str, tmp_path: Path) -> None:
    """Each call stays below its own limit; the sum does not. The graders' own limit is shortened here."""
    folder = BUNDLED / pool
    limit_s = tomllib.loads((folder / "task.toml").read_text())["verifier"]["timeout_sec"]
    shutil.copytree(folder / "tests", tmp_path / "tests")
    multi = pool.startswith("multi")
    script = tmp_path / "tests" / ("grading.py" if multi else "test_solution.py")
    source = script.read_text()
    total = re.search(r"(?m)^TOTAL_LIMIT_S = ([\d.]+)", source)
    assert total is not None
    assert float(total[1]) <= limit_s * 0.7
    script.write_text(source.replace(total[0], "TOTAL_LIMIT_S = 2").replace("CPU_LIMIT_S = 2 ", "CPU_LIMIT_S = 9 "))
    if multi:
        work = tmp_path / "app"
        shutil.copytree(folder / "environment/app", work)
        subprocess.run(["bash", folder / "solution/solve.sh"], cwd=work, check=False, capture_output=True)
        for path in work.rglob("*.py"):
            path.write_text(SLOW + path.read_text())
    else:
        work = tmp_path / "solution.py"
        work.write_text("import time\ntime.sleep(40)\ndef double(x): return 2 * x\n")
    reward = tmp_path / "logs/reward.txt"
    reward.parent.mkdir()
    began = time.monotonic()
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-B", script, work, reward],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert reward.read_text() == "0\n", done
    assert "took more than 2" in done.stdout, done
    assert time.monotonic() - began < 20


NEGATIVE = "#!/bin/bash\necho -0.5 > /logs/verifier/reward.txt\n"
HUGE = "#!/bin/bash\necho 1e300 > /logs/verifier/reward.txt\n"
MANY = (
    "#!/bin/bash\npython3 -c 'import json; "
    'print(json.dumps({f"k{i}": 0 for i in range(200)}))\' > /logs/verifier/reward.json\n'
)
LONG = "#!/bin/bash\ntruncate -s 10G /logs/verifier/reward.txt\n"


@pytest.mark.parametrize(
    ("test_sh", "expected"),
    [
        (NEGATIVE, {"reward": -0.5}),  # a task may take points off
        (HUGE, "VerifierOutputParseError"),
        (MANY, "VerifierOutputParseError"),
        (LONG, "RewardFileNotFoundError"),  # never read into memory
    ],
)
async def test_rewards_beyond_reason_are_no_verdict(
    test_sh: str, expected: object, tmp_path: Path, cache: Path
) -> None:
    task = kit.write_task(tmp_path / "victim", test_sh)
    result = (await kit.attack(task, {"nothing": "true"}, tmp_path, cache))["nothing"]
    assert (result.rewards or result.exception_type) == expected
