"""What both gateways promise: the same cases through the proxy alone and through a real SMG."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from pathlib import Path

import psutil
import pytest

from rl360.errors import EngineError, InfrastructureError
from rl360.protocols import Gateway
from rl360.types import Stop
from tests.gateway.kit_gateways import KINDS, Server, make, rig
from tests.gateway.stub_engine import Fault
from tests.gateway.test_random_chats import check_truth

pytestmark = pytest.mark.parametrize("kind", KINDS)
NAMES = [f"a{i}" for i in range(8)]


async def test_sessions_from_start_to_close(kind: str, tmp_path: Path) -> None:
    async with rig(kind, tmp_path, start=False) as made:
        assert isinstance(made.gateway, Gateway)
        assert not await made.gateway.health()
        await made.gateway.start()
        assert await made.gateway.health()
        await made.gateway.verify()
        for server in made.servers:
            server.model.samples.clear()
        specs = await made.open(*NAMES)
        for _ in range(3):
            await asyncio.gather(*(made.say(name) for name in NAMES))
        await made.gateway.discard(specs[0].try_id)
        sessions = [await made.gateway.close_session(spec.try_id) for spec in specs[1:]]
        counts = await made.gateway.counts()
    engines = [0, 0]
    for session in sessions:
        (segment,) = session.segments
        by_engine = [
            [s for s in server.model.samples if segment.token_ids_T.tolist()[: len(s.prompt)] == list(s.prompt)]
            for server in made.servers
        ]
        (mine,) = [samples for samples in by_engine if samples]  # a session stays with one engine
        engines[by_engine.index(mine)] += 1
        assert len(mine) == len(session.turns) == 3
        check_truth(session, mine)
        assert (session.engine_resends, session.engine_moves) == (0, 0)
    assert min(engines) >= 1
    assert (counts["engine_resends"], counts["engine_moves"]) == (0, 0)


async def test_held_sessions_wait(kind: str, tmp_path: Path) -> None:
    async with rig(kind, tmp_path) as made:
        await made.open("h0", "h1")
        await made.say("h0")
        asked = sum(made.asked())
        await made.gateway.hold()
        waiting = [asyncio.ensure_future(made.say(name)) for name in ("h0", "h1")]
        await asyncio.sleep(0.3)
        assert sum(made.asked()) == asked
        assert await made.gateway.idle(0.1) == 0
        await made.gateway.release()
        await asyncio.gather(*waiting)
        assert sum(made.asked()) == asked + 2


async def test_a_burst_of_new_sessions_is_spread(kind: str, tmp_path: Path) -> None:
    async with rig(kind, tmp_path) as made:
        for server in made.servers:
            server.model.delay_s = 1.0
        names = [f"b{i}" for i in range(24)]
        await made.open(*names)
        await asyncio.gather(*(made.say(name) for name in names))
    assert min(made.asked()) >= 8, made.asked()


async def test_an_engine_dies_and_its_sessions_go_on_elsewhere(kind: str, tmp_path: Path) -> None:
    async with rig(kind, tmp_path) as made:
        specs = await made.open(*NAMES)
        await asyncio.gather(*(made.say(name) for name in NAMES))
        before = made.asked()
        dead, alive = made.servers
        await dead.stop()
        for _ in range(2):
            await asyncio.gather(*(made.say(name) for name in NAMES))
        sessions = [await made.gateway.close_session(spec.try_id) for spec in specs]
        counts = await made.gateway.counts()
        assert alive.model.num_requests == before[1] + 2 * len(NAMES)
    assert all(len(session.turns) == 3 and session.stop is None for session in sessions)
    moved = [session for session in sessions if session.engine_moves]
    assert len(moved) == before[0] == counts["engine_moves"]
    assert sum(session.engine_resends for session in sessions) == counts["engine_resends"] >= 1
    rows = [json.loads(line) for line in (made.log_dir / "sessions.jsonl").read_text().splitlines()]
    assert sum(row["engine_moves"] for row in rows) == len(moved)


async def test_an_engine_that_comes_back_with_old_weights_is_not_asked_until_it_has_the_new(
    kind: str, tmp_path: Path
) -> None:
    async with rig(kind, tmp_path) as made:
        for server in made.servers:
            server.model.version = 7
        await made.open(*NAMES)
        await asyncio.gather(*(made.say(name) for name in NAMES))
        if kind == "smg":
            await asyncio.sleep(0.6)  # its keeper looks every 0.2 s
        back, _ = made.servers
        await back.stop()
        await asyncio.gather(*(made.say(name) for name in NAMES))
        back.model.version = 0  # what it was started with
        await back.start()
        had = back.model.num_requests
        await asyncio.sleep(1.5)
        others = [f"b{i}" for i in range(6)]
        await made.open(*others)
        await asyncio.gather(*(made.say(name) for name in others))
        assert back.model.num_requests == had
        back.model.version = 7

        async def until_it_is_asked() -> None:
            number = 0
            while back.model.num_requests == had:
                number += 1
                names = [f"c{number}-{i}" for i in range(6)]
                await made.open(*names)
                await asyncio.gather(*(made.say(name) for name in names))
                await asyncio.sleep(0.2)

        await asyncio.wait_for(until_it_is_asked(), 20)


async def test_engines_leave_and_join_while_sessions_run(kind: str, tmp_path: Path) -> None:
    newcomer = Server()
    async with rig(kind, tmp_path) as made:
        await made.open(*NAMES)
        await asyncio.gather(*(made.say(name) for name in NAMES))
        await newcomer.start()
        try:
            leaves, stays = made.servers
            had = leaves.model.num_requests
            await made.gateway.set_engines([stays.url, newcomer.url])
            await asyncio.gather(*(made.say(name) for name in NAMES))
            others = [f"b{i}" for i in range(12)]
            await made.open(*others)
            for server in (stays, newcomer):
                server.model.delay_s = 0.3
            await asyncio.gather(*(made.say(name) for name in others))
            assert leaves.model.num_requests == had
            assert newcomer.model.num_requests >= 1
        finally:
            await newcomer.stop()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_costs_a_resend_and_no_attempt(kind: str, tmp_path: Path, status: int) -> None:
    async with rig(kind, tmp_path) as made:
        (spec,) = await made.open("a")
        await made.say("a")
        mine = next(server for server in made.servers if server.model.num_requests)
        mine.model.faults.append(Fault("status", status))
        await made.say("a")
        session = await made.gateway.close_session(spec.try_id)
    assert (len(session.turns), session.stop, session.engine_resends) == (2, None, 1)


async def test_a_request_that_the_engine_refuses_is_not_sent_again(kind: str, tmp_path: Path) -> None:
    async with rig(kind, tmp_path) as made:
        (spec,) = await made.open("a")
        for server in made.servers:
            server.model.faults.append(Fault("status", 400))
        status, payload = await made.ask("a")
        assert (status, payload["error"]["code"]) == (502, "engine_status_400")
        assert sum(made.asked()) == 1
        session = await made.gateway.close_session(spec.try_id)
    assert (session.stop, session.cause) == (Stop.INFRASTRUCTURE, "engine_status_400")


@pytest.mark.slow
async def test_a_slow_engine_is_waited_for(kind: str, tmp_path: Path) -> None:
    """Longer than SMG waits by default for a worker that finishes nothing (3 s), with a queue that grows."""
    async with rig(kind, tmp_path) as made:
        await made.open(*NAMES)
        for server in made.servers:
            server.model.delay_s = 5.0
        asking = []
        for name in NAMES:
            asking.append(asyncio.create_task(made.say(name)))
            await asyncio.sleep(0.3)
        await asyncio.gather(*asking)
        counts = await made.gateway.counts()
    assert sum(made.asked()) == len(NAMES)
    assert counts["engine_resends"] == 0


async def test_a_turn_that_takes_too_long_is_dropped_by_the_engine_too(kind: str, tmp_path: Path) -> None:
    async with rig(kind, tmp_path, request_timeout_s=1.0) as made:
        (spec,) = await made.open("a")
        for server in made.servers:
            server.model.delay_s = 30.0
        status, payload = await made.ask("a")
        assert (status, payload["error"]["code"]) == (504, "engine_timeout")
        await made.gateway.close_session(spec.try_id)
        await asyncio.sleep(0.3)
        assert "a.t0.0.0" in [rid for server in made.servers for rid in server.model.aborted]


@pytest.mark.parametrize(
    "field",
    ["meta_info.weight_version", "meta_info.output_token_logprobs", "meta_info.finish_reason", "output_ids"],
)
async def test_verify_names_the_engine_that_leaves_a_field_out(kind: str, tmp_path: Path, field: str) -> None:
    async with rig(kind, tmp_path) as made:
        bad = made.servers[1]
        bad.model.faults.extend([Fault("drop", field=field)] * 9)
        with pytest.raises(EngineError, match=rf"engine {bad.url}: {field} is missing"):
            await made.gateway.verify()
        bad.model.faults.clear()
        await made.gateway.verify()


async def test_the_engines_key_opens_every_hop_and_stands_nowhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "k-3f81c5d0e9"
    monkeypatch.setenv("TEST_ENGINE_KEY", key)
    async with rig(kind, tmp_path, api_key=key, api_key_env="TEST_ENGINE_KEY") as made:
        await made.gateway.verify()
        (spec,) = await made.open("a")
        await made.say("a")
        await made.servers[0].stop()
        await made.say("a")
        await made.gateway.close_session(spec.try_id)
        assert key not in made.logs()
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert key.encode() not in status.read_bytes()
            except OSError:
                continue  # a process that just ended


async def test_a_wrong_key_is_told_before_training(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ENGINE_KEY", "wrong")
    kwargs = {"start_timeout_s": 2.0} if kind == "smg" else {}
    async with rig(kind, tmp_path, start=False, api_key="right", api_key_env="TEST_ENGINE_KEY", **kwargs) as made:

        async def start_and_verify() -> None:
            await made.gateway.start()
            await made.gateway.verify()

        with pytest.raises(InfrastructureError, match="engine_status_401"):
            await start_and_verify()


async def test_a_gateway_that_was_never_started_closes(kind: str, tmp_path: Path) -> None:
    await make(kind, tmp_path, ["http://127.0.0.1:9"]).close()


async def test_a_dead_proxy_is_counted_and_started_again_though_nobody_asks_it(kind: str, tmp_path: Path) -> None:
    """A row of metrics is written while no session opens or closes."""
    async with rig(kind, tmp_path) as made:
        before = await made.gateway.counts()
        pid = made.gateway._group.pid(0)
        os.kill(pid, signal.SIGKILL)
        dead = await made.gateway.counts()
        assert dead.keys() == before.keys()
        assert dead["engine_resends"] == 0
        async with asyncio.timeout(30):
            while made.gateway._group.pid(0) == pid or not await made.gateway.health():  # noqa: ASYNC110 another process
                await asyncio.sleep(0.05)
        assert (await made.gateway.counts())["proxy_restarts"] == 1
        await made.open("a")
        await made.say("a")


async def test_counts_go_on_when_a_proxy_is_replaced(kind: str, tmp_path: Path) -> None:
    """Rows of metrics hold what has been added since the last: a count that began at 0 again would hide as much."""
    async with rig(kind, tmp_path) as made:
        await made.open(*NAMES)
        await asyncio.gather(*map(made.say, NAMES))  # some on each engine
        await made.servers[0].stop()
        await asyncio.gather(*map(made.say, NAMES))
        before = await made.gateway.counts()
        assert before["engine_resends"] + before["engine_moves"] >= 1
        os.kill(made.gateway._group.pid(0), signal.SIGKILL)
        async with asyncio.timeout(30):
            while (await made.gateway.counts())["proxy_restarts"] == 0 or not await made.gateway._proxy_answers():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        after = await made.gateway.counts()
        assert (after["engine_resends"], after["engine_moves"]) == (before["engine_resends"], before["engine_moves"])


async def test_more_sessions_than_a_shells_limit_of_open_files(kind: str, tmp_path: Path) -> None:
    """Each session has two connections; at a limit of 1024, 700 of them made engines look as if they refused."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip(f"this machine allows {limits[1]} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        async with rig(kind, tmp_path) as made:
            pids = [made.gateway._group.pid(0)]
            if kind == "smg":
                pids.append((await made.gateway._smg_group.call(0, "state"))["pid"])
            for pid in pids:
                assert psutil.Process(pid).rlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
