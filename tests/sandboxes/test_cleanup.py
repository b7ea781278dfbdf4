"""After kill -9 nothing is left: by the keeper when only the worker died, by the next start when both did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl360.sandboxes.local import cgroups, cleanup

HOLD = """
import asyncio, json, sys
from pathlib import Path
from rl360.sandboxes.local import cgroups, layers, rootfs
from rl360.sandboxes.local.namespace import Keeper, SandboxProcess
from rl360.sandboxes.local.plan import Plan

async def main():
    cache, userns = Path(sys.argv[1]), sys.argv[2] == "userns"
    base, hierarchy = rootfs.resolve("auto", cache), cgroups.find()
    keeper = Keeper(cache / "owners", "killed", hierarchy)
    limits = cgroups.Limits(memory_mib=256, cpus=1.0, pids=64)
    plan = Plan(layers.base_trees(base), "overlay", userns, hierarchy, limits, 0, 60.0, False, masks=base.masks)
    for _ in range(2):
        sandbox = SandboxProcess(keeper, plan)
        await sandbox.start()
        await sandbox.run("(setsid sleep 7654 &) ; (while :; do sleep 0.05; done &) ; echo x > /tmp/file")
    print(json.dumps({"keeper": keeper._process.pid, "owner": keeper.owner.name}), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def groups_of(owner: str) -> list[str]:
    parents = set(cgroups.find().parents.values())
    return [str(g) for parent in parents for g in Path(parent).glob(f"{cgroups.PREFIX}{owner}.*")]


def wait_for(condition: Any, timeout_s: float = 10.0) -> bool:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@contextmanager
def holder(
    cache: Path, how: str = "plain", prefix: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict]]:
    command = [*prefix, sys.executable, "-c", HOLD, str(cache), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def mounts_of_host() -> str:
    return Path("/proc/self/mountinfo").read_text()


@pytest.mark.sandbox
@pytest.mark.parametrize("how", ["plain", "userns"])
def test_the_keeper_cleans_up_after_its_worker(tmp_path: Path, how: str) -> None:
    if how == "plain" and os.getuid() != 0:
        pytest.skip("needs root")
    with holder(tmp_path, how) as (process, about):
        folder = tmp_path / "owners" / about["owner"]
        assert folder.is_dir()
        assert (list(folder.glob("*/upper0/tmp/file")) and len(groups_of(about["owner"]))) or how == "userns"
        assert about["owner"] not in mounts_of_host()  # mounts are the sandboxes' own
        process.kill()
        assert wait_for(lambda: not folder.exists())
        assert wait_for(lambda: not Path(f"/proc/{about['keeper']}").exists())
        assert groups_of(about["owner"]) == []
        assert cleanup._processes_with_mount(str(folder / "mnt")) == set()


@pytest.mark.sandbox
def test_the_next_start_cleans_up_when_the_keeper_died_too(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    with holder(tmp_path) as (process, about), holder(tmp_path) as (_, other):
        folder = tmp_path / "owners" / about["owner"]
        os.kill(about["keeper"], signal.SIGSTOP)  # so that it cannot clean up when the worker goes
        process.kill()
        process.wait()
        os.kill(about["keeper"], signal.SIGKILL)
        assert wait_for(lambda: cleanup.process_start(about["keeper"]) is None)
        assert folder.is_dir()
        swept = cleanup.sweep(tmp_path / "owners")
        assert swept.owners == (about["owner"],)
        assert not folder.exists()
        assert groups_of(about["owner"]) == []
        assert cleanup._processes_with_mount(str(folder / "mnt")) == set()
        # the other owner runs, and keeps what is its own
        assert (tmp_path / "owners" / other["owner"]).is_dir()
        assert cgroups.processes(groups_of(other["owner"])) or not cgroups.find().usable
        assert cleanup.sweep(tmp_path / "owners").owners == ()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    owner = cleanup.register(tmp_path, "run/with:odd name", [])
    assert cleanup.sweep(tmp_path).owners == ()
    record = owner.folder / "owner.json"
    row = json.loads(record.read_text())
    assert (row["pid"], row["start"]) == (os.getpid(), cleanup.process_start(os.getpid()))
    record.write_text(json.dumps({**row, "start": row["start"] - 1}))
    assert cleanup.sweep(tmp_path).owners == (owner.name,)
    assert not owner.folder.exists()


def test_after_a_reboot_only_folders_are_left(tmp_path: Path) -> None:
    owner = cleanup.register(tmp_path, "run", [])
    record = owner.folder / "owner.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "boot": "another"}))
    assert cleanup.sweep(tmp_path).owners == (owner.name,)


def test_a_half_made_owner_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    assert cleanup.sweep(tmp_path).owners == ()
    assert (tmp_path / "half").exists()


def test_no_such_process() -> None:
    assert cleanup.process_start(2**22 - 3) is None
