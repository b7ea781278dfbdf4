"""What counts as a full disk, and what is said of it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rl360.engine import disk
from rl360.engine.frames import append
from rl360.errors import DiskFull, RL360Error


def chained(inner: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            raise RuntimeError("the checkpoint was not written") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (chained(OSError(errno.ENOSPC, "")), True),
        (RL360Error("rank 3: SafetensorError: I/O error: No space left on device (os error 28)"), True),
        (chained(ValueError("another")), False),
    ],
)
def test_what_is_a_full_disk(error: BaseException, full: bool) -> None:
    assert disk.is_full(error) is full


def test_a_file_system_without_room_explains_what_a_library_does_not_say(monkeypatch, tmp_path: Path) -> None:
    """torch's writer: `unexpected pos 64 vs 0`."""
    error = RuntimeError("unexpected pos 704 vs 598")
    assert not disk.is_full(error, tmp_path)
    usage = type("Usage", (), {"total": 2**30, "used": 2**30, "free": 4096})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert disk.is_full(error, tmp_path)


def test_a_write_that_fails_names_its_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append(Path("/dev/full"), [b"x"], durable=False)


def test_the_error_says_where_how_much_is_there_and_what_is_needed(tmp_path: Path) -> None:
    mib = 2**20
    (tmp_path / "plan.json").write_text(json.dumps({"disk_bytes": {"checkpoints": 6 * mib, "trajectories": mib}}))
    half = tmp_path / "checkpoints" / ".tmp-iteration-000001"
    half.mkdir(parents=True)
    (half / "trainer.pt").write_bytes(os.urandom(3 * mib))
    (tmp_path / "kept").write_bytes(os.urandom(2 * mib))
    error = OSError(errno.ENOSPC, "No space left on device")
    error.filename = str(half / "trainer.pt")
    with disk.reserve(tmp_path):
        assert (tmp_path / ".reserve").stat().st_blocks * 512 >= mib
        found = disk.disk_full(error, tmp_path)
        assert not (tmp_path / ".reserve").exists()
    assert isinstance(found, DiskFull)
    text = str(found)
    assert text.startswith(f"{half / 'trainer.pt'}: the disk is full (OSError: [Errno 28] No space left on device")
    assert f"{tmp_path} holds 2.0 MiB" in text
    assert "forecast at 7.0 MiB (checkpoints 6.0 MiB, trajectories 1.0 MiB): about 5.0 MiB more" in text
    assert not half.exists()


def test_the_log_of_a_rank_is_not_in_the_sentence(tmp_path: Path) -> None:
    error = RL360Error('publish: rank 0 of 2: OSError: [Errno 28] No space left\ntrainer-0: Traceback\n  File "x.py"')
    text = str(disk.disk_full(error, tmp_path))
    assert "(RL360Error: publish: rank 0 of 2: OSError: [Errno 28] No space left). " in text
    assert "\n" not in text


def test_other_errors_of_the_last_things_are_raised(tmp_path: Path) -> None:
    with disk.unless_full(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="Permission"), disk.unless_full(tmp_path):
        raise OSError(errno.EACCES, "Permission denied")
