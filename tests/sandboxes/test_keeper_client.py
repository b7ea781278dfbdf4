"""The worker's end of a keeper that does not keep up: nothing that it was told is lost, nothing fails for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rl360.sandboxes import abilities
from rl360.sandboxes.local import cgroups, layers, rootfs
from rl360.sandboxes.local.namespace import Keeper, SandboxProcess
from rl360.sandboxes.local.plan import Plan

pytestmark = pytest.mark.sandbox

FLOOD = 300  # messages of 4 KiB: several times what the socket holds


async def _start_behind_a_flood(keeper: Keeper, plan: Plan) -> list[str]:
    sandboxes = [SandboxProcess(keeper, plan) for _ in range(3)]
    os.kill(keeper._process.pid, signal.SIGSTOP)
    starting = []
    try:
        for number in range(FLOOD):
            keeper.request({"op": "kill", "id": f"nobody-{number}", "filler": "x" * 4096}, [])
        starting = [asyncio.create_task(sandbox.start()) for sandbox in sandboxes]
        await asyncio.sleep(0.2)
        assert len(keeper._unsent) > len(sandboxes), "the socket held everything; this tests nothing"
        assert not any(task.done() for task in starting)
    finally:
        os.kill(keeper._process.pid, signal.SIGCONT)
    await asyncio.gather(*starting)
    said = [(await sandbox.run("echo hello")).stdout for sandbox in sandboxes]
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    assert not keeper._unsent
    assert not keeper._gone, "a kill was lost"
    return said


async def _end_by_itself(keeper: Keeper, sandbox: SandboxProcess) -> None:
    """Its input is closed, and its shell ends. Returns when the keeper has seen to it."""
    os.close(sandbox._stdin)
    sandbox._stdin = -1
    await asyncio.wait_for(asyncio.shield(keeper._gone[sandbox.name]), 10)


async def _read_after_it_ended(keeper: Keeper, plan: Plan) -> str:
    sandbox = SandboxProcess(keeper, plan)
    await sandbox.start()
    await sandbox.run("echo the answer > /tmp/answer")
    await _end_by_itself(keeper, sandbox)
    folder = keeper.owner.folder / sandbox.name.rpartition(".")[2]
    assert folder.is_dir()
    disk = await sandbox.halt()
    fd = disk.open("/tmp/answer", os.O_RDONLY)
    try:
        said = os.read(fd, 100).decode()
    finally:
        os.close(fd)
    await sandbox.stop()
    for _ in range(100):
        if not folder.exists():
            return said
        await asyncio.sleep(0.05)
    raise AssertionError(f"{folder} is left")


async def _stop_after_it_ended(keeper: Keeper, plan: Plan) -> bool:
    sandbox = SandboxProcess(keeper, plan)
    await sandbox.start()
    await _end_by_itself(keeper, sandbox)
    folder = keeper.owner.folder / sandbox.name.rpartition(".")[2]
    await sandbox.stop()
    for _ in range(100):
        if not folder.exists():
            return True
        await asyncio.sleep(0.05)
    return False


def _plan(cache_dir: Path, disk_mib: int) -> Plan:
    report, base = abilities.probe(), rootfs.resolve("auto", cache_dir)
    hierarchy, limits = cgroups.find(), cgroups.Limits()
    return Plan(
        layers.base_trees(base), report.root_mode, report.userns, hierarchy, limits, disk_mib, 60.0, False,
        masks=base.masks,
    )  # fmt: skip


def test_a_disk_in_a_folder_outlives_its_sandbox_until_it_is_released(tmp_path: Path) -> None:
    """With disk_mib 0. A keeper that was busy saw a sandbox end (its input was closed) before it read that the disk is
    still wanted, and removed it while the answer was being carried to the verifier: right answers scored 0."""
    plan = _plan(tmp_path / "cache", disk_mib=0)
    keeper = Keeper(tmp_path / "owners", "ended", plan.hierarchy)
    try:
        assert asyncio.run(_read_after_it_ended(keeper, plan)) == "the answer\n"
        assert asyncio.run(_stop_after_it_ended(keeper, plan))
    finally:
        keeper.close()


def test_sandboxes_start_however_far_the_keeper_is_behind(tmp_path: Path) -> None:
    """128 attempts that begin at once on few cores fill its socket; each that met it was called a broken sandbox."""
    plan = _plan(tmp_path / "cache", disk_mib=64)
    before = len(os.listdir("/proc/self/fd"))
    keeper = Keeper(tmp_path / "owners", "flooded", plan.hierarchy)
    try:
        assert asyncio.run(_start_behind_a_flood(keeper, plan)) == ["hello\n"] * 3
    finally:
        keeper.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors of messages that waited are still open"
