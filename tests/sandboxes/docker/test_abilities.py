"""What check says of a Docker daemon. No daemon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rl360.sandboxes.docker import abilities

INFO = {
    "ServerVersion": "20.10.24", "Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]],
    "MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True,
}  # fmt: skip


def fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_parse() -> None:
    daemon = abilities.parse_info(json.dumps(INFO))
    assert (daemon.version, daemon.storage, daemon.backing) == ("20.10.24", "overlay2", "extfs")
    assert daemon.limits == {"memory", "cpu", "pids"}
    assert not daemon.may_limit_disk
    assert abilities.parse_info(json.dumps({**INFO, "DriverStatus": [["Backing Filesystem", "xfs"]]})).may_limit_disk
    assert abilities.parse_info(json.dumps({**INFO, "Driver": "btrfs", "DriverStatus": None})).may_limit_disk
    with pytest.raises(ValueError, match="Cannot connect"):
        abilities.parse_info(json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon"]}))


def test_no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = abilities.problems(abilities.probe())
    assert problem == "sandbox: docker: docker is not on the PATH; install Docker, or use sandbox=local"


def test_no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    fake_docker(tmp_path, monkeypatch, "echo '{}'; echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    (problem,) = abilities.problems(abilities.probe())
    assert problem.startswith("sandbox: docker daemon: Cannot connect to the Docker daemon; start it")
    assert "unix:///nowhere.sock" in problem


def test_a_daemon_without_compose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = f"case $1 in info) echo '{json.dumps(INFO)}';; compose) exit 1;; buildx) echo v0.13;; esac"
    fake_docker(tmp_path, monkeypatch, script)
    found = abilities.probe()
    (problem,) = abilities.problems(found)
    assert "docker compose: missing" in problem
    (warning,) = abilities.warnings(found)
    assert "docker disk limit: storage overlay2 on extfs has no quotas" in warning
