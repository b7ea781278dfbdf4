"""What is Daytona's alone: key and address, capacity, rate limits, resources. Against the stand-in, not the service."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rl360.sandboxes.daytona import abilities, capacity
from tests.sandboxes.contract.backends import Backend, new_sandbox
from tests.sandboxes.contract.conftest import KEY_VARIABLE
from tests.sandboxes.contract.daytona_standin import StandIn
from tests.sandboxes.contract.trials import SOLUTIONS, trial

pytestmark = pytest.mark.sandbox


def made(standin: StandIn, folder: Path, task: dict[str, Any] | None = None, **fields: Any) -> Any:
    from rl360.sandboxes.daytona import DaytonaSandbox

    given = {"api_url": f"{standin.url}/api", "api_key_env": KEY_VARIABLE, "cache_dir": folder / "cache", **fields}
    return new_sandbox(
        Backend("daytona", DaytonaSandbox), folder, "FROM python:3.12\nWORKDIR /app\n", task or {}, {}, given
    )


async def test_what_is_asked_for(standin: StandIn, tmp_path: Path) -> None:
    s = made(standin, tmp_path / "a", {"env": {"A": "1"}}, memory_mib=1500, cpus=1.5, disk_mib=512, lifetime_s=90.0)
    await s.start(force_build=False)
    (asked,) = standin.created
    assert (asked["memory"], asked["cpu"], asked["disk"]) == (2, 2, 1)  # GiB, cores, GiB: rounded up
    assert asked["networkBlockAll"] is True
    assert asked["ttlMinutes"] == 2
    assert asked["autoDeleteInterval"] == 0
    assert asked["labels"]["rl360.run"] == "contract"
    assert asked["env"] == {"A": "1"}
    assert "FROM python:3.12" in asked["buildInfo"]["dockerfileContent"]
    await s.stop(delete=False)
    assert standin.num_open == 0


async def test_the_base_stands_in_for_every_image(standin: StandIn, tmp_path: Path) -> None:
    s = made(standin, tmp_path / "a", base="mirror/python:3.12")
    await s.start(force_build=False)
    assert standin.created[0]["buildInfo"]["dockerfileContent"].startswith("FROM mirror/python:3.12\n")
    await s.stop(delete=True)


async def test_no_key_and_a_wrong_key(standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl360.sandboxes.daytona import client

    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(Exception, match=f"variable {KEY_VARIABLE} is not set") as missing:
        await made(standin, tmp_path / "a").start(force_build=False)
    assert type(missing.value).__name__ == "SandboxBuildFailedError"
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    await client.close()
    s = made(standin, tmp_path / "b")
    with pytest.raises(Exception, match="Unauthorized") as wrong:
        await s.start(force_build=False)
    assert type(wrong.value).__name__ == "DaytonaAuthenticationError"
    await s.stop(delete=True)
    assert standin.num_open == 0


@pytest.mark.parametrize("kind", ["create", "session", "files"])
async def test_a_rate_limit_is_waited_out(standin: StandIn, tmp_path: Path, kind: str) -> None:
    standin.limit_next[kind] = 3
    s = made(standin, tmp_path / "a")
    await s.start(force_build=False)
    assert (await s.exec("echo x")).stdout == "x\n"
    (tmp_path / "f").write_text("data")
    await s.upload_file(tmp_path / "f", "/app/f")
    assert (await s.exec("cat f", cwd="/app")).stdout == "data"
    assert standin.limit_next[kind] == 0
    await s.stop(delete=True)


async def test_a_rate_limit_that_stays_is_the_services_error(standin: StandIn, tmp_path: Path) -> None:
    standin.limit_next["create"] = 10_000
    s = made(standin, tmp_path / "a", patience_s=0.5)
    began = time.monotonic()
    with pytest.raises(Exception, match="Too many requests") as error:
        await s.start(force_build=False)
    assert type(error.value).__name__ == "DaytonaRateLimitError"
    assert time.monotonic() - began < 10
    await s.stop(delete=True)


async def test_an_account_without_room_is_waited_for(standin: StandIn, tmp_path: Path) -> None:
    standin.capacity = 1
    first, second = made(standin, tmp_path / "a", patience_s=20.0), made(standin, tmp_path / "b", patience_s=20.0)
    await first.start(force_build=False)
    starting = asyncio.create_task(second.start(force_build=False))
    await asyncio.sleep(0.3)
    assert not starting.done()
    await first.stop(delete=True)
    await starting
    await second.stop(delete=True)


async def test_no_more_than_max_sandboxes_are_open(standin: StandIn, tmp_path: Path) -> None:
    async def one(number: int) -> None:
        s = made(standin, tmp_path / f"s{number}", max_sandboxes=2, cache_dir=tmp_path / "cache")
        await s.start(force_build=False)
        await s.exec("sleep 0.2")
        await s.stop(delete=True)

    await asyncio.gather(*(one(n) for n in range(5)))
    assert (len(standin.created), standin.most_open, standin.num_open) == (5, 2, 0)


async def test_no_free_sandbox_is_a_start_timeout(standin: StandIn, tmp_path: Path) -> None:
    shared = {"max_sandboxes": 1, "capacity_wait_s": 0.3, "cache_dir": tmp_path / "cache"}
    first, second = made(standin, tmp_path / "a", **shared), made(standin, tmp_path / "b", **shared)
    await first.start(force_build=False)
    with pytest.raises(Exception, match="all 1 sandboxes stayed in use") as error:
        await second.start(force_build=False)
    assert type(error.value).__name__ == "EnvironmentStartTimeoutError"
    await second.stop(delete=True)
    await first.stop(delete=True)


async def test_a_sandbox_that_is_gone_is_a_runtime_error(standin: StandIn, tmp_path: Path) -> None:
    s = made(standin, tmp_path / "a")
    await s.start(force_build=False)
    await standin.lose()
    with pytest.raises(RuntimeError, match="sandbox ended"):
        await s.exec("true")
    await s.stop(delete=True)


async def test_a_failed_start_gives_its_slot_back(standin: StandIn, tmp_path: Path) -> None:
    from rl360.sandboxes.daytona import DaytonaSandbox

    backend = Backend("daytona", DaytonaSandbox)
    for number in range(3):
        given = {"api_url": f"{standin.url}/api", "api_key_env": KEY_VARIABLE, "cache_dir": tmp_path / "cache"}
        given |= {"max_sandboxes": 1, "capacity_wait_s": 0.3}
        s = new_sandbox(backend, tmp_path / f"s{number}", "FROM x\nRUN exit 3\n", {}, {}, given)
        with pytest.raises(Exception, match="build") as error:
            await s.start(force_build=False)
        assert type(error.value).__name__ == "SandboxBuildFailedError"
        await s.stop(delete=True)


@pytest.mark.parametrize(("solution", "reward"), SOLUTIONS)
async def test_a_whole_trial(standin: StandIn, tmp_path: Path, solution: str, reward: float) -> None:
    from rl360.rollout.harbor_trial import TaskCache

    kwargs = {"api_url": f"{standin.url}/api", "api_key_env": KEY_VARIABLE, "cache_dir": str(tmp_path / "cache")}
    result = await trial("rl360.sandboxes.daytona:DaytonaSandbox", kwargs, tmp_path, solution, TaskCache(swaps=False))
    assert (result.exception_type, result.exception_message) == (None, None)
    assert result.rewards == {"reward": reward}
    assert (len(standin.created), standin.num_open) == (2, 0)  # the agent's and the verifier's


# -- without the stand-in ---------------------------------------------------------------------------------------------


def test_pauses() -> None:
    from rl360.sandboxes.daytona.client import pause_s

    assert pause_s(0, {"Retry-After": "7"}) == 7.0
    assert pause_s(0, {"retry-after": "3600"}) == 30.0
    assert 0.5 <= pause_s(0, None) <= 0.75
    assert 4.0 <= pause_s(3, {"Retry-After": "soon"}) <= 6.0
    assert 30.0 <= pause_s(20, None) <= 45.0


async def test_slots_are_given_back_when_their_holder_is_gone(tmp_path: Path) -> None:
    slot = await capacity.take(tmp_path, 1, 0.1)
    with pytest.raises(capacity.NoFreeSlot):
        await capacity.take(tmp_path, 1, 0.1)
    slot.release()
    slot.release()
    (await capacity.take(tmp_path, 1, 0.1)).release()


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    found = {a.name: a for a in abilities.probe("NO_SUCH_KEY", "http://example.org/api")}
    assert found["daytona package"].ok
    assert found["daytona key"].detail == "variable NO_SUCH_KEY is not set"
    assert "unencrypted" in found["daytona address"].detail
    monkeypatch.setenv("NO_SUCH_KEY", "secret-value")
    found = {a.name: a for a in abilities.probe("NO_SUCH_KEY", "https://example.org/api")}
    assert all(a.ok for a in found.values())
    assert "secret-value" not in str(found)
