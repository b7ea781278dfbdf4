"""Dockerfiles on another base, and what Compose is told. No daemon."""

from __future__ import annotations

import pytest

from rl360.sandboxes.docker.recipe import Limits, Recipe, on_base

LIMITS = Limits(memory_mib=256, cpus=1.5, pids=64, disk_mib=100, disk_quota=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("FROM python:3.12-slim\nWORKDIR /app\n", "FROM base:1\nWORKDIR /app\n"),
        ("from  python\n", "from  base:1\n"),
        ("FROM --platform=linux/amd64 a/b@sha256:00 AS build\n", "FROM --platform=linux/amd64 base:1 AS build\n"),
        ("FROM x AS One\nRUN a\nFROM one\nFROM y\n", "FROM base:1 AS One\nRUN a\nFROM one\nFROM base:1\n"),
        ("FROM scratch\n", "FROM scratch\n"),
        ("# syntax=docker/dockerfile:1\nFROM x\n", "FROM base:1\n"),
        ("FROM x\nRUN echo \\\nFROM y\n", "FROM base:1\nRUN echo \\\nFROM y\n"),
    ],
)
def test_on_base(given: str, expected: str) -> None:
    assert on_base(given, "base:1") == expected


def recipe(**changed: object) -> Recipe:
    fields: dict[str, object] = {
        "limits": LIMITS, "labels": {"rl360.run": "r"}, "lifetime_s": 90.0, "network": False, "services": False,
        "image": "task:1", "dockerfile": None, "build_network": False,
    }  # fmt: skip
    return Recipe(**{**fields, **changed})  # type: ignore[arg-type]


def test_a_plain_task() -> None:
    (main,) = recipe().compose()["services"].values()
    assert main["network_mode"] == "none"
    assert main["build"] == {"labels": {"rl360.image": "task"}, "network": "none"}
    assert (main["image"], main["pull_policy"], main["command"][:2]) == ("task:1", "never", ["bash", "-c"])
    assert "sleep 90.0 && exit 0; exit 3" in main["command"][2]
    assert "$" not in main["command"][2]  # Compose would put variables in
    assert (main["init"], main["stop_grace_period"], main["labels"]) == (False, "0s", {"rl360.run": "r"})
    assert (main["mem_limit"], main["memswap_limit"], main["cpus"], main["pids_limit"]) == ("256m", "256m", 1.5, 64)
    assert main["ulimits"] == {"fsize": 100 * 2**20}
    assert "storage_opt" not in main
    assert "MKNOD" in main["cap_drop"]
    assert "runtime" not in main
    assert recipe(runtime="runsc").compose()["services"]["main"]["runtime"] == "runsc"


def test_no_limits() -> None:
    (main,) = recipe(limits=Limits(0, 0, 0, 0, True)).compose()["services"].values()
    assert not {"mem_limit", "memswap_limit", "cpus", "pids_limit", "ulimits", "storage_opt"} & set(main)


def test_a_disk_quota_where_the_storage_has_them() -> None:
    (main,) = recipe(limits=Limits(0, 0, 0, 100, True)).compose()["services"].values()
    assert main["storage_opt"] == {"size": "100m"}
    assert "ulimits" not in main


def test_networks() -> None:
    with_network = recipe(network=True).compose()
    assert with_network["networks"]["default"] == {"name": "rl360-sandboxes", "external": True}
    assert "network_mode" not in with_network["services"]["main"]
    services = recipe(services=True).compose()
    assert services["networks"]["default"]["internal"] is True
    assert "command" not in services["services"]["main"]  # the task's own Compose file says
    assert recipe(services=True, network=True).compose()["networks"]["default"]["internal"] is False


def test_a_ready_image() -> None:
    (main,) = recipe(image=None).compose()["services"].values()
    assert not {"image", "build", "pull_policy"} & set(main)
    (main,) = recipe(image=None, ready_image="here:1").compose()["services"].values()
    assert (main["image"], main["pull_policy"]) == ("here:1", "never")
