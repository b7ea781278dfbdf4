from pathlib import Path

import pytest

from rl360.diagnostics import machine


def test_memory_is_at_most_the_machines_and_respects_a_control_group(monkeypatch):
    whole = machine.memory()
    assert 0 < whole.available <= whole.total
    monkeypatch.setattr(machine, "_cgroup_memory_limit", lambda: 1000)
    assert machine.memory() == machine.Memory(total=1000, available=1000)


def test_the_nearest_existing_folder(tmp_path):
    assert machine.existing_ancestor(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "file").write_text("")
    assert machine.existing_ancestor(tmp_path / "file" / "x") == tmp_path / "file"
    assert machine.existing_ancestor(Path("/")) == Path("/")


def test_writing_is_tried_and_leaves_nothing(tmp_path):
    assert machine.write_problem(tmp_path / "new" / "folder") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert machine.write_problem(tmp_path / "file" / "x") == f"{tmp_path}/file is a file"
    assert "cannot write to /proc" in str(machine.write_problem(Path("/proc/x")))


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("NVIDIA H200, 143771, 570.1\n", [machine.Gpu("NVIDIA H200", 143771, "570.1")]),
        ("No devices were found\n", []),
        ("", []),
    ],
)
def test_gpus_as_nvidia_smi_lists_them(monkeypatch, tmp_path, printed, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.gpus() == expected


def test_no_tool_means_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
