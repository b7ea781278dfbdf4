"""A run whose disk fills up: it ends by name, keeps what it had, and goes on later."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rl360.diagnostics.recount import recount
from rl360.errors import DiskFull
from tests.e2e.test_run_tiny import ROOT, RUN_TIMEOUT_S, command, environment, finish, metrics, resume_command

__all__ = ["environment"]
pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

DISK_MIB = 24


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Whatever else is on the machine takes the room."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:  # the run writes meanwhile
        while (free := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - leave) > 0:
            file.write(bytes(min(2**20, free)))
    return filler


@pytest.mark.parametrize(
    ("leave", "iterations"),
    [
        (0, 4),  # the next row of a record, whichever comes first
        (400_000, 1),  # the checkpoint of 0.7 MB at the end, which torch reports without saying why
    ],
)
def test_a_full_disk_ends_the_run_by_name_and_it_goes_on_when_there_is_room(
    leave: int, iterations: int, small_disk: Path, tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    out = small_disk / "run"
    run = subprocess.Popen(
        command(tiny_llama_dir, out, f"iterations={iterations}"),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        ready = out / ("metrics.jsonl" if iterations > 1 else "trajectories")
        while not ready.exists() or (ready.is_file() and not ready.read_text()):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        filler = fill(small_disk, leave)
        text, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        run.kill()
    assert run.returncode == DiskFull.exit_code == 28, text
    assert "Traceback" not in text
    assert f"DiskFull: {out}" in text
    (more,) = re.findall(r"about ([\d.]+) MiB more", text)
    assert 0.65 <= float(more) <= 3  # a checkpoint at least, and no more than the whole run takes
    assert f"rl360 run resume={out}" in text
    summary = json.loads((out / "summary.json").read_text())
    assert summary["exit_reason"] == "failed"
    assert summary["error"].startswith("DiskFull: ")
    assert summary["attempts"]["trained"] == 8
    assert not (out / ".reserve").exists()
    assert not list((out / "checkpoints").glob(".tmp-*"))
    filler.unlink()
    finish(resume_command(out), environment)
    assert json.loads((out / "summary.json").read_text())["exit_reason"] == "finished"
    assert [row["iteration"] for row in metrics(out)] == list(range(iterations))
    assert recount(out).problems == []
