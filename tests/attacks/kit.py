"""Attacks on the reward as real Harbor trials: victims, a scripted agent, and what training would make of the result.

An attack is a bash script that runs as root in the agent's sandbox. The agent finds it by the URL that it gets in the
place of a model's: `attack://<name>`. Scripts do nothing that could harm the host if the sandbox let them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities

from rl360.config.schemas import AgentConfig, SandboxConfig
from rl360.rollout.failures import INTERRUPTED, Action, classify
from rl360.rollout.trial_worker import TrialWorker
from rl360.sandboxes.local.environment import LocalSandbox
from rl360.types import AttemptSpec, Sampling, Session, Task, TrialResult, Turn

MARKER = "only-the-tests-know-5f1c"  # stands in tests/ and solution/, and nowhere that an agent may look
RIGHT = "def double(x):\n    return 2 * x\n"
ORACLE = f"cat > /app/solution.py <<'END'\n{RIGHT}END\n"
_FOLDER = Path(__file__).parent / "scripts"
PRELUDE = (_FOLDER / "prelude.sh").read_text()

SCRIPTS: dict[str, str] = {}  # name -> script, of the trials that run


def scripts_of(group: str) -> dict[str, str]:
    """The scripts of a file, each under a line `#== name`."""
    _, *parts = re.split(r"(?m)^#== (\S+)\n", (_FOLDER / f"{group}.sh").read_text())
    return {name: f"{PRELUDE}\n{script}" for name, script in zip(parts[::2], parts[1::2], strict=True)}


AFTERWARDS = ("true", f"true {'x' * 9000}")  # a sandbox that a script spoiled has to answer again

# A test as people write them: python and tools from the PATH, the answer imported into its own process. Attacks from
# outside of the artifacts must fail on it all the same. (An answer that attacks from inside is test_answers.py's.)
IMPORTS_IT = """#!/bin/bash
cd /app
if timeout 20 python3 /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
# The answer's output in a file of the working directory, compared by a tool from the PATH.
COMPARES_OUTPUT = """#!/bin/bash
timeout 20 python3 solution.py > out.txt 2>/dev/null
if diff -q out.txt /tests/expected.txt > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
# A test runner that the image brings.
USES_A_RUNNER = """#!/bin/bash
if pytest /tests > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
# Lists every file of the system that the tests run in: names, kinds, sizes, owners, modes, times and link targets.
LISTS_THE_SYSTEM = """#!/bin/bash
find / -xdev \\( -path /app -o -path /logs -o -path /tests -o -path /proc -o -path /dev -o -path /.rl360 \\) -prune \\
    -o ! -type d -printf '%p %y %s %U:%G %m %T@ %l\\n' -o -type d -printf '%p %y %U:%G %m\\n' \\
    | grep -v __pycache__ | sort > /logs/verifier/files.txt
find /usr -xdev ! -type d -printf '%p %y %s %U:%G %m %T@ %l\\n' | sort >> /logs/verifier/files.txt
sha256sum /usr/bin/python3 /bin/bash /bin/sh /etc/passwd /etc/ld.so.cache >> /logs/verifier/files.txt
ps -eo args= | sort >> /logs/verifier/files.txt
env | sort >> /logs/verifier/files.txt
echo 0 > /logs/verifier/reward.txt
"""
CHECK_PY = f"""# {MARKER}
import sys
sys.path.insert(0, "/app")
from solution import double
assert double(3) == 6 and double(-4) == -8
"""
RUNNER = """#!/usr/bin/python3
import runpy, sys
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[1] + "/check.py")
"""


def write_task(folder: Path, test_sh: str = IMPORTS_IT, toml: str = "") -> Task:
    files = {
        "instruction.md": "Write `double(x)` into /app/solution.py.\n",
        "task.toml": f'version = "1.0"\n{toml}\n[agent]\ntimeout_sec = 60.0\n',
        "environment/Dockerfile": (
            "FROM x\nCOPY pytest /usr/local/bin/pytest\nRUN chmod 755 /usr/local/bin/pytest\n"
            "WORKDIR /app\nRUN mkdir data && echo original > data/file && ln -s /usr/share data/link\n"
        ),
        "environment/pytest": RUNNER,
        "tests/test.sh": test_sh,
        "tests/check.py": CHECK_PY,
        "tests/reference/solution.py": RIGHT,  # a reference answer beside the test
        "tests/expected.txt": f"6 {MARKER}\n",
        "solution/solve.sh": f"# {MARKER}\n{ORACLE}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Task(folder.name, folder, ("test",), "")


class ScriptedAgent(BaseAgent):
    """Runs the script that its URL names, then a short and a long command, as an agent of several turns does."""

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def set_web_tools_disabled(self, disabled: bool, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        script = SCRIPTS[(self._base_url or "").removeprefix("attack://").removesuffix("/")]
        context.metadata = {"stop": "finished"}
        try:
            # An attack may wait for ever; the controls only ever wait for a busy machine.
            done = await environment.exec(script, timeout_sec=15 if PRELUDE in script else 50)
            context.metadata["said"] = (done.stdout or "") + (done.stderr or "")
            for command in AFTERWARDS:
                await environment.exec(command, timeout_sec=15)
        except RuntimeError as error:
            if "timed out" not in str(error):  # a script may take too long; a broken sandbox is the trial's error
                raise


class Elsewhere(LocalSandbox):
    """Stands for an environment of someone else's, which knows nothing of verification."""

    start_afresh = None  # type: ignore[assignment]
    settle_for_verifier = None  # type: ignore[assignment]


def score(result: TrialResult) -> float | str:
    """The reward that training would see; a text when it would see none."""
    turn = Turn((), {}, "stop", 1, 1, 0.0, 0)
    verdict = classify(result, Session((), (turn,), None, None, 0.0), agent_timeout_s=60.0)
    if verdict.action is Action.SCORE_ZERO:
        return 0.0
    if verdict.action is Action.TRAIN:
        assert result.rewards is not None
        return result.rewards["reward"]
    reason = result.agent_metadata.get(INTERRUPTED) or result.exception_message
    return f"{verdict.action}: {verdict.cause}: {reason}"


async def attack(
    task: Task,
    scripts: Mapping[str, str],
    folder: Path,
    cache: Path,
    *,
    at_once: int = 3,
    sandbox: Mapping[str, Any] | None = None,
) -> dict[str, TrialResult]:
    """One trial for each script, few at once."""
    SCRIPTS.update(scripts)
    worker = TrialWorker(
        agent={**asdict(AgentConfig()), "import_path": f"{__name__}:ScriptedAgent", "timeout_s": 60.0},
        sandbox={**asdict(SandboxConfig()), "disk_mib": 64, "memory_mib": 256, "pids": 64, **(sandbox or {})},
        cache_dir=cache,
        trials_dir=folder / "trials",
        trial_timeout_s=120.0,
        model_name="none",
        max_concurrent=at_once,
        start_interval_s=0.0,
        run_id="attacks",
        keep_trial_dirs=True,
    )
    await worker.start()
    try:
        specs = [AttemptSpec(f"{task.task_id}-{n}", "g", 0, task, Sampling(), 0) for n in scripts]
        results = await asyncio.gather(*(worker.run(s, f"attack://{n}") for s, n in zip(specs, scripts, strict=True)))
    finally:
        await worker.close()
    return dict(zip(scripts, results, strict=True))


def scores(results: Mapping[str, TrialResult]) -> dict[str, float | str]:
    return {name: score(result) for name, result in results.items()}
