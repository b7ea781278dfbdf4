"""Attacks on the reward from outside of the artifacts: each scores 0 on a test as people write them; the oracle 1."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rl360.sandboxes.local import host
from tests.attacks import kit

pytestmark = pytest.mark.sandbox

GROUPS = {name: kit.scripts_of(name) for name in ("forged", "planted", "processes", "disks", "places", "breakdowns")}
EVERY = {name: script for scripts in GROUPS.values() for name, script in scripts.items()}
CONTROLS = {"oracle": kit.ORACLE, "nothing": "true"}


@pytest.mark.parametrize("group", GROUPS)
async def test_nothing_fake_gets_a_reward(group: str, tmp_path: Path, cache: Path) -> None:
    task = kit.write_task(tmp_path / "victim")
    results = await kit.attack(task, {**GROUPS[group], **CONTROLS}, tmp_path, cache)
    assert kit.scores(results) == {**dict.fromkeys(GROUPS[group], 0.0), "oracle": 1.0, "nothing": 0.0}
    if group == "places":
        said = results["looks-for-the-answer"].agent_metadata["said"]
        assert said.splitlines()[0].startswith("cp: cannot stat '/tests"), (
            said
        )  # neither find nor grep printed anything
        refused = results["answer-is-a-link-to-the-tests"].agent_metadata["artifacts_refused"]
        assert refused == ["/app/solution.py: a link that leaves the artifact"]


@pytest.mark.parametrize("kind", ["output", "runner"])
async def test_other_kinds_of_test(kind: str, tmp_path: Path, cache: Path) -> None:
    test_sh = kit.COMPARES_OUTPUT if kind == "output" else kit.USES_A_RUNNER
    task = kit.write_task(tmp_path / "victim", test_sh)
    shim = "make_shim; cp /tmp/shim /usr/local/bin/pytest; cp /tmp/shim /usr/bin/pytest"
    attacks = {
        # The test itself would write the answer's output over the program that compares it.
        "output-is-a-link-to-the-comparer": (
            "ln -s /usr/bin/diff /app/out.txt; echo \"print('#!/bin/sh\\nexit 0')\" > /app/solution.py"
        ),
        "output-is-a-link-to-the-expected": "ln -s /tests/expected.txt /app/out.txt",
        "runner-replaced": f"{kit.PRELUDE}\n{shim}",
        **{name: EVERY[name] for name in ("hooks-of-python", "path-shims", "tools-replaced")},
    }
    oracle = f"echo 'print(\"6 {kit.MARKER}\")' > /app/solution.py" if kind == "output" else kit.ORACLE
    results = await kit.attack(task, {**attacks, "oracle": oracle}, tmp_path, cache)
    assert kit.scores(results) == {**dict.fromkeys(attacks, 0.0), "oracle": 1.0}


ACROSS = (
    "loop", "folder-is-a-link", "hooks-of-python", "python-replaced", "kills-the-verifier", "forges-exit-codes", "proc",
    "races-the-copy", "fills-the-disk", "folder-is-a-link-to-the-tests", "kills-the-shell",
)  # fmt: skip


async def test_in_user_namespaces(tmp_path: Path, cache: Path) -> None:
    task = kit.write_task(tmp_path / "victim")
    attacks = {name: EVERY[name] for name in ACROSS}
    results = await kit.attack(task, {**attacks, **CONTROLS}, tmp_path, cache, sandbox={"unprivileged": True})
    assert kit.scores(results) == {**dict.fromkeys(attacks, 0.0), "oracle": 1.0, "nothing": 0.0}


AS_A_USER = """
import asyncio, json, os, sys
from pathlib import Path
from tests.attacks import kit, test_reward
assert os.geteuid() == 1000
folder = Path(sys.argv[1])
attacks = {name: test_reward.EVERY[name] for name in test_reward.ACROSS} | test_reward.CONTROLS
task = kit.write_task(folder / "victim")
limits = {"memory_mib": 0, "pids": 0, "cpus": 0.0}
print(json.dumps(kit.scores(asyncio.run(kit.attack(task, attacks, folder, folder / "cache", sandbox=limits)))))
"""


def test_without_root_at_all(tmp_path: Path) -> None:
    """As uid 1000 without any capability: in a user namespace of its own when the tests run as root."""
    command = [sys.executable, "-c", AS_A_USER, str(tmp_path)]
    if os.getuid() == 0:
        command = ["bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--dev-bind", "/", "/", "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    expected = {**dict.fromkeys(ACROSS, 0.0), "oracle": 1.0, "nothing": 0.0}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


async def test_with_the_disk_in_a_folder(tmp_path: Path, cache: Path) -> None:
    """disk_mib 0: what the agent wrote is on the host's disk, and goes when the trial ends."""
    task = kit.write_task(tmp_path / "victim")
    attacks = {name: EVERY[name] for name in ("loop", "python-replaced", "folder-is-a-link-to-the-tests", "one-hole")}
    results = await kit.attack(task, {**attacks, **CONTROLS}, tmp_path, cache, sandbox={"disk_mib": 0})
    assert kit.scores(results) == {**dict.fromkeys(attacks, 0.0), "oracle": 1.0, "nothing": 0.0}
    assert not list((cache / "owners").iterdir())


async def test_nothing_outside_of_the_artifacts_survives(tmp_path: Path, cache: Path) -> None:
    """The system that the tests see is the same file by file, whatever the agent did to its own."""
    task = kit.write_task(tmp_path / "victim", kit.LISTS_THE_SYSTEM)
    names = ("hooks-of-python", "python-library", "path-shims", "startup-files", "loader-settings", "setuid-shell")
    parts = [*(f"( {EVERY[name]} )" for name in names), "touch /new /usr/new /etc/new /root/new /tmp/new"]
    everything = "\n".join(parts)
    # Before and after: programs of this machine write to its /usr meanwhile, compiled Python for one.
    scripts = {"before": "true", "everything": everything, "after": "true"}
    results = await kit.attack(task, scripts, tmp_path, cache, at_once=1)
    seen = {n: set((r.trial_dir / "verifier/files.txt").read_text().splitlines()) for n, r in results.items()}
    assert len(seen["before"]) > 1000
    assert any("/usr/bin/env" in line for line in seen["before"])
    differing = seen["everything"] - (seen["before"] | seen["after"])
    differing |= (seen["before"] & seen["after"]) - seen["everything"]
    assert [line for line in differing if "/usr/local/bin/pytest" in line or "/app" not in line] == []


SPOILS = (
    "folder-where-the-script-goes", "folder-where-every-script-goes", "fills-the-control-folder", "stops-the-shell",
    "logs-are-files", "deep-tests-folder",
)  # fmt: skip


async def test_what_an_agent_breaks_is_no_failure_of_the_host(tmp_path: Path, cache: Path) -> None:
    """Where the tests run in the agent's own sandbox, too: zero, and not masked, so that breaking it never pays."""
    task = kit.write_task(tmp_path / "victim", toml=SHARED)
    results = await kit.attack(task, {n: EVERY[n] for n in SPOILS} | CONTROLS, tmp_path, cache)
    assert kit.scores(results) == {**dict.fromkeys(SPOILS, 0.0), "oracle": 1.0, "nothing": 0.0}


async def test_many_deep_folders_at_once_take_few_descriptors(tmp_path: Path, cache: Path) -> None:
    task = kit.write_task(tmp_path / "victim")
    deep = "cd /app; for i in $(seq 98); do mkdir d && cd d || break; done"
    scripts = {f"deep{i}": deep for i in range(6)} | {f"oracle{i}": kit.ORACLE for i in range(2)}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    results = await kit.attack(task, scripts, tmp_path, cache, at_once=8)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert {r.agent_metadata.get("exhausted") for n, r in results.items() if "deep" in n} == {"artifacts"}
    expected = {name: float("oracle" in name) for name in scripts}
    assert kit.scores(results) == expected


SHARED = '[verifier]\nenvironment_mode = "shared"'


async def test_the_shared_state_is_weaker_as_the_guide_says(tmp_path: Path, cache: Path) -> None:
    """Shows too that the attacks are real: they succeed where a task asks for the agent's own sandbox."""
    task = kit.write_task(tmp_path / "victim", toml=SHARED)
    real = ("hooks-of-python", "python-replaced", "path-shims", "answer-is-a-link-to-the-tests")
    held = ("early", "loop", "folder-is-a-link", "kills-the-verifier", "tests-ready-made", "waits-for-the-tests")
    results = await kit.attack(task, {n: EVERY[n] for n in (*real, *held)} | CONTROLS, tmp_path, cache)
    expected = {**dict.fromkeys(real, 1.0), **dict.fromkeys(held, 0.0), "oracle": 1.0, "nothing": 0.0}
    assert kit.scores(results) == expected


SEPARATE = 'artifacts = ["/app/solution.py"]\n[verifier]\nenvironment_mode = "separate"'


async def test_harbors_separate_verifier_holds_too(tmp_path: Path, cache: Path) -> None:
    task = kit.write_task(tmp_path / "victim", toml=SEPARATE)
    links = ("answer-is-a-link-to-the-tests", "folder-is-a-link-to-the-tests")
    names = ("loop", "hooks-of-python", "python-replaced", "one-hole", *links)
    results = await kit.attack(task, {n: EVERY[n] for n in names} | CONTROLS, tmp_path, cache)
    assert kit.scores(results) == {**dict.fromkeys(names, 0.0), "oracle": 1.0, "nothing": 0.0}


async def test_harbors_separate_verifier_blames_the_agent_too(tmp_path: Path, cache: Path) -> None:
    task = kit.write_task(tmp_path / "victim", toml=SEPARATE.replace("/app/solution.py", "/app"))
    names = ("folder-where-the-script-goes", "fills-the-control-folder", "logs-are-files", "long-paths", "deep-folders")
    names += ("link-with-an-odd-name", "no-folder", "folder-is-a-file", "empty-folders")
    results = await kit.attack(task, {n: EVERY[n] for n in names} | CONTROLS, tmp_path, cache)
    assert kit.scores(results) == {**dict.fromkeys(names, 0.0), "oracle": 1.0, "nothing": 0.0}


async def test_other_environments_get_harbors_separate_verifier(tmp_path: Path, cache: Path) -> None:
    """An environment that does not change over itself; the task says nothing."""
    task = kit.write_task(tmp_path / "victim")
    names = ("loop", "path-shims", "kills-the-verifier", "answer-is-a-link-to-the-tests")
    other = {
        "import_path": f"{kit.__name__}:Elsewhere",
        "kwargs": {"cache_dir": str(cache), "run_id": "other", "disk_mib": 64},
    }
    results = await kit.attack(task, {n: EVERY[n] for n in names} | CONTROLS, tmp_path, cache, sandbox=other)
    host.close_hosts()
    assert kit.scores(results) == {**dict.fromkeys(names, 0.0), "oracle": 1.0, "nothing": 0.0}


async def test_a_task_with_steps_is_refused(tmp_path: Path, cache: Path) -> None:
    task = kit.write_task(tmp_path / "victim", toml='[[steps]]\nname = "one"\n')
    step = task.path / "steps/one"
    (step / "tests").mkdir(parents=True)
    (step / "instruction.md").write_text("Do it.\n")
    (step / "tests/test.sh").write_text(kit.IMPORTS_IT)
    result = (await kit.attack(task, {"oracle": kit.ORACLE}, tmp_path, cache))["oracle"]
    assert result.exception_type == "UnsupportedTaskError"
    assert "environment_mode" in (result.exception_message or "")
