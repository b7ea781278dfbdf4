import pytest
import torch

from rl360.errors import CheckpointError
from rl360.trainers import checkpoint
from rl360.trainers.checkpoint import STATE_FILE, read_state, write_state


def test_round_trip_replaces_and_leaves_nothing_behind(tmp_path):
    write_state(tmp_path / "a", {"x": torch.arange(3)})
    write_state(tmp_path / "a", {"x": torch.arange(4), "n": 5})
    state = read_state(tmp_path / "a")
    assert state["n"] == 5
    assert state["x"].tolist() == [0, 1, 2, 3]
    assert [p.name for p in (tmp_path / "a").iterdir()] == [STATE_FILE]


def test_a_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    write_state(tmp_path, {"n": 1})

    def torn(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        write_state(tmp_path, {"n": 2})
    assert read_state(tmp_path)["n"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [STATE_FILE]


def test_missing_torn_and_foreign_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="not found"):
        read_state(tmp_path)
    write_state(tmp_path, {"x": torch.zeros(100)})
    whole = (tmp_path / STATE_FILE).read_bytes()
    for torn in (whole[: len(whole) // 2], b"", b"text"):
        (tmp_path / STATE_FILE).write_bytes(torn)
        with pytest.raises(CheckpointError, match="unreadable"):
            read_state(tmp_path)
    torch.save({"format": 99}, tmp_path / STATE_FILE)
    with pytest.raises(CheckpointError, match="format 99"):
        read_state(tmp_path)
