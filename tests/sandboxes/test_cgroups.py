"""Where control groups are made and what is written, on folders that look like /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.sandboxes.local import cgroups
from rl360.sandboxes.local.cgroups import Hierarchy, Limits


def make_v2(folder: Path, procs: str, controllers: str = "cpu memory pids", root: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(procs)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text("")
    if not root:
        (folder / "cgroup.type").write_text("domain")


def self_file(folder: Path, text: str) -> Path:
    path = folder / "self"
    path.write_text(text)
    return path


def test_v1_groups_are_made_below_the_own_one(tmp_path: Path) -> None:
    for name, own in (("memory", "outer/mine"), ("cpu", ""), ("pids", "")):
        (tmp_path / name / own).mkdir(parents=True)
    own = self_file(tmp_path, "9:pids:/\n4:memory:/outer/mine\n1:cpu:/\n0::/\n")
    found = cgroups.find(tmp_path, own)
    assert found.version == 1
    assert found.parents == {
        "memory": str(tmp_path / "memory/outer/mine"), "cpu": str(tmp_path / "cpu"), "pids": str(tmp_path / "pids"),
    }  # fmt: skip
    folders = cgroups.create(found, "s1", Limits(memory_mib=64, cpus=0.5, pids=10))
    assert (tmp_path / "memory/outer/mine/rl360-s1/memory.limit_in_bytes").read_text() == str(64 * 2**20)
    assert (tmp_path / "cpu/rl360-s1/cpu.cfs_quota_us").read_text() == "50000"
    assert (tmp_path / "pids/rl360-s1/pids.max").read_text() == "10"
    assert len(folders) == 3


def test_v2_takes_the_nearest_ancestor_without_processes(tmp_path: Path) -> None:
    make_v2(tmp_path, "1\n", root=True)
    make_v2(tmp_path / "user.slice", "")
    make_v2(tmp_path / "user.slice/session.scope", "10\n11\n")
    found = cgroups.find(tmp_path, self_file(tmp_path, "0::/user.slice/session.scope\n"))
    assert found.version == 2
    assert set(found.parents.values()) == {str(tmp_path / "user.slice")}
    folders = cgroups.create(found, "s1", Limits(memory_mib=64, cpus=2.0, pids=10))
    group = tmp_path / "user.slice/rl360-s1"
    assert folders == [str(group)]
    assert (group / "memory.max").read_text() == str(64 * 2**20)
    assert (group / "cpu.max").read_text() == "200000 100000"
    assert (group / "pids.max").read_text() == "10"


def test_v2_container_root_moves_its_processes_to_a_leaf(tmp_path: Path) -> None:
    make_v2(tmp_path, "7\n")  # a namespace's root: it has a type, the machine's root has none
    found = cgroups.find(tmp_path, self_file(tmp_path, "0::/\n"))
    assert found.parents["memory"] == str(tmp_path)
    assert (tmp_path / "rl360-init/cgroup.procs").read_text() == "7"


def test_a_controller_that_is_not_offered_is_named(tmp_path: Path) -> None:
    make_v2(tmp_path, "", controllers="memory pids", root=True)
    found = cgroups.find(tmp_path, self_file(tmp_path, "0::/\n"))
    assert found.missing(Limits(1, 1.0, 1)) == ["cpu"]
    assert "cpu" in found.reason
    assert found.missing(Limits(memory_mib=1)) == []


def test_no_groups_at_all(tmp_path: Path) -> None:
    found = cgroups.find(tmp_path, self_file(tmp_path, ""))
    assert not found.usable
    assert found.missing(Limits(1, 1.0, 1)) == ["memory", "cpu", "pids"]
    assert cgroups.create(found, "s1", Limits(1, 1.0, 1)) == []


def test_no_limits_make_no_groups(tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, dict.fromkeys(("memory", "cpu", "pids"), str(tmp_path)))
    assert cgroups.create(hierarchy, "s1", Limits()) == []


def test_oom_kills_are_read_from_either_version(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/memory.failcnt").write_text("0\n")
    (tmp_path / "v1/memory.memsw.failcnt").write_text("7\n")
    (tmp_path / "v1/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2/memory.events").write_text("low 0\noom 2\noom_kill 2\n")
    assert cgroups.oom_kills([str(tmp_path / "v1")]) == (3, 0)
    assert cgroups.oom_kills([str(tmp_path / "v2")]) == (2, 0)
    assert cgroups.oom_kills([]) == (0, 0)


def test_kills_by_a_limit_outside_are_told_apart(tmp_path: Path) -> None:
    """The kernel counts them in the group of the killed process too, whose own limit was never hit."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (tmp_path / "v1/memory.failcnt").write_text("0\n")
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2/memory.events").write_text("low 0\nmax 0\noom 0\noom_kill 1\n")
    assert cgroups.oom_kills([str(tmp_path / "v1")]) == (0, 1)
    assert cgroups.oom_kills([str(tmp_path / "v2")]) == (0, 1)


@pytest.mark.parametrize(("most_mib", "expected"), [(128, (1, 0)), (127, (1, 0)), (100, (0, 1))])
def test_a_kernel_that_counts_no_refused_charges(tmp_path: Path, most_mib: int, expected: tuple[int, int]) -> None:
    """Linux 6.18 with v1: failcnt stays 0. A memory bomb was taken for the machine's lack of memory there."""
    rows = {"oom_control": "oom_kill 1\n", "failcnt": "0\n", "limit_in_bytes": f"{128 << 20}\n"}
    for file, text in {**rows, "max_usage_in_bytes": f"{most_mib << 20}\n"}.items():
        (tmp_path / f"memory.{file}").write_text(text)
    assert cgroups.oom_kills([str(tmp_path)]) == expected
