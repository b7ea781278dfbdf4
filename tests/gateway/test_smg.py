"""SMG for real: embedded engines behind it, and what happens when it dies, hangs, or loses a field."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from aiohttp import web

from rl360.errors import ConfigError, EngineError, InfrastructureError
from rl360.gateway import smg, smg_process
from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.server import EngineServer
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.generation import sampling_params
from rl360.gateway.ports import free_port
from rl360.gateway.prompt_ids import IdText
from rl360.gateway.proxy import ProxyWorker
from rl360.gateway.smg_process import SmgSettings, launch_arguments
from rl360.gateway.smg_route import SmgRoute, routing_key
from rl360.gateway.smg_worker import SmgWorker
from rl360.models.loading import load_decoder
from rl360.types import Sampling
from tests.gateway.kit import write_folder
from tests.gateway.kit_gateways import Server, make, rig
from tests.gateway.stub_engine import Fault
from tests.tiny_model import write_tiny_llama


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def keeper(tmp_path: Path, urls: list[str], **kwargs: Any) -> AsyncIterator[SmgWorker]:
    """SMG with its keeper in this process."""
    settings = {"port": free_port(), "metrics_port": free_port(), "smg_key": "k", "health_interval_s": 0.1, **kwargs}
    worker = SmgWorker(0, urls, "127.0.0.1", log_dir=tmp_path / "logs", **{"stop_timeout_s": 0.5, **settings})
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[Server]]:
    made = [Server() for _ in range(count)]
    for server in made:
        await server.start()
    try:
        yield made
    finally:
        for server in made:
            await server.stop()


# ---- the whole chain with a model behind it


async def test_embedded_engines_behind_smg_say_what_they_say_alone(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", seed=3)
    engines = [EmbeddedEngine(load_decoder(folder), folder, kv_cache_gib=0.01, num_threads=1) for _ in range(2)]
    running = [EngineServer(engine) for engine in engines]
    urls = [server.start() for server in running]
    names = [f"e{i}" for i in range(4)]
    try:
        async with rig("smg", tmp_path, 0, engine_urls=urls, tokenizer_dir=folder) as made:
            await made.gateway.verify()
            specs = await made.open(*names, max_new_tokens=24, max_context_tokens=1000)
            for _ in range(3):
                await asyncio.gather(*(made.say(name) for name in names))
            sessions = [await made.gateway.close_session(spec.try_id) for spec in specs]
        assert all(session.engine_moves == session.engine_resends == 0 for session in sessions)
        client = HttpEngine(urls[0])
        for session in sessions:
            (segment,) = session.segments
            assert {span.version for span in segment.version_spans} == {0}
            ids, mask = segment.token_ids_T, segment.loss_mask_T
            assert mask.sum() == sum(turn.completion_tokens for turn in session.turns)
            # What was trained on is what an engine says of these very ids when it is asked directly.
            first = segment.prompt_length
            count = session.turns[0].completion_tokens
            again = await client.generate(ids[:first].tolist(), {"max_new_tokens": 1, "temperature": 1.0}, "again")
            assert again["meta_info"]["prompt_tokens"] == first
            expected = teacher_forced(folder, ids[: first + count].tolist(), first)
            np.testing.assert_allclose(segment.logprobs_T[first : first + count], expected, atol=1e-3)
        await client.close()
    finally:
        for server in running:
            server.close()


def teacher_forced(folder: Path, ids: list[int], first: int) -> np.ndarray[Any, Any]:
    """logprobs of ids[first:] by transformers, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    rows = torch.arange(first - 1, len(ids) - 1)
    picked: np.ndarray[Any, Any] = logprobs[rows, torch.tensor(ids[first:])].numpy()
    return picked


# ---- SMG's life


async def test_a_killed_smg_comes_back_at_its_address_and_no_session_notices(tmp_path: Path) -> None:
    async with rig("smg", tmp_path) as made:
        names = [f"a{i}" for i in range(6)]
        specs = await made.open(*names)
        await asyncio.gather(*(made.say(name) for name in names))
        for server in made.servers:
            server.model.delay_s = 1.5
        asking = [asyncio.create_task(made.say(name)) for name in names]
        await asyncio.sleep(0.5)
        state = await made.gateway._smg_group.call(0, "state")
        os.kill(state["pid"], signal.SIGKILL)
        await asyncio.gather(*asking)
        sessions = [await made.gateway.close_session(spec.try_id) for spec in specs]
        assert await made.gateway.health()
        counts = await made.gateway.counts()
    assert all((len(session.turns), session.stop) == (2, None) for session in sessions)
    assert all(session.engine_resends >= 1 for session in sessions)  # each had a request open, and it is counted
    assert counts["smg_restarts"] == 1
    assert "smg ended with code -9" in made.logs()


async def test_the_keeper_of_smg_is_replaced_too(tmp_path: Path) -> None:
    async with rig("smg", tmp_path) as made:
        (spec,) = await made.open("a")
        await made.say("a")
        state = await made.gateway._smg_group.call(0, "state")
        os.kill(made.gateway._smg_group.pid(0), signal.SIGKILL)
        await until(lambda: not alive(state["pid"]))
        await made.say("a")
        session = await made.gateway.close_session(spec.try_id)
        await until(lambda: made.gateway._worker_restarts == 1)
        assert (await made.gateway.counts())["smg_restarts"] == 1
        made.gateway._smg_state = {**made.gateway._smg_state, "smg_restarts": 2}
        await made.gateway._replace_keeper("is replaced by a test")
        assert (await made.gateway.counts())["smg_restarts"] == 4  # two of the old keeper's, and two keepers
    assert (len(session.turns), session.stop) == (2, None)


async def test_a_keeper_that_hangs_is_replaced_and_not_with_engines_that_have_gone_since(tmp_path: Path) -> None:
    async with rig("smg", tmp_path, call_timeout_s=2.0) as made:
        stays, goes = made.servers
        await made.gateway.set_engines([stays.url])
        await goes.stop()
        smg_pid = (await made.gateway._smg_group.call(0, "state"))["pid"]
        os.kill(made.gateway._smg_group.pid(0), signal.SIGSTOP)
        await until(lambda: not alive(smg_pid))
        await until(lambda: made.gateway._smg_state.get("engines") == [stays.url])
        assert await made.gateway.health()
        await made.open("a")
        await made.say("a")
        assert (await made.gateway.counts())["smg_restarts"] == 1


async def test_a_keeper_that_stood_still_is_told_again_what_it_did_not_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smg, "TELL_S", 0.2)
    async with rig("smg", tmp_path) as made:
        stays, goes = made.servers
        pid = made.gateway._smg_group.pid(0)
        os.kill(pid, signal.SIGSTOP)
        await made.gateway.set_engines([stays.url])
        os.kill(pid, signal.SIGCONT)
        await until(lambda: made.gateway._smg_state.get("engines") == [stays.url])
        assert made.gateway._smg_state["wanted"] == [stays.url]
        os.kill(pid, signal.SIGSTOP)
        await made.gateway.set_engines([stays.url, goes.url])
        os.kill(pid, signal.SIGCONT)
        await until(lambda: len(made.gateway._smg_state["engines"]) == 2)
        assert not made.gateway._worker_restarts


async def test_a_keeper_that_is_replaced_while_the_set_changes_begins_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smg, "TELL_S", 5.0)
    async with rig("smg", tmp_path, call_timeout_s=1.0) as made:
        stays, goes = made.servers
        await goes.stop()
        os.kill(made.gateway._smg_group.pid(0), signal.SIGSTOP)
        await made.gateway.set_engines([stays.url])
        await until(lambda: made.gateway._smg_state.get("wanted") == [stays.url])
        assert made.gateway._worker_restarts == 1


async def test_whatever_keeps_the_keeper_from_starting_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that was not thought of ended the task that looks after SMG."""
    async with rig("smg", tmp_path) as made:
        make_group, problems = made.gateway._make_group, [OSError(errno.EMFILE, "Too many open files"), KeyError("bug")]

        def fail_first(**kwargs: Any) -> Any:
            if problems:
                raise problems.pop()
            return make_group(**kwargs)

        monkeypatch.setattr(made.gateway, "_make_group", fail_first)
        os.kill(made.gateway._smg_group.pid(0), signal.SIGKILL)
        await until(lambda: made.gateway._worker_restarts == 3)
        await until(lambda: len(made.gateway._smg_state.get("engines", ())) == 2)
        await made.open("a")
        await made.say("a")


async def test_whatever_keeps_smg_from_starting_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker:
        start, problems = worker._smg.start, [RuntimeError("can't start new thread")]

        async def fail_first(timeout_s: float) -> None:
            if problems:
                raise problems.pop()
            await start(timeout_s)

        monkeypatch.setattr(worker._smg, "start", fail_first)
        os.kill(worker.state()["pid"], signal.SIGKILL)
        await until(lambda: not problems and worker.state()["failure"] is None)
        await until(lambda: alive(worker.state()["pid"]) and worker.state()["engines"] == [server.url])


@pytest.mark.parametrize("answer", ["hello", "[]", "{}", '{"workers": 3}', '{"workers": [{"url": "http://a"}]}'])
async def test_an_answer_that_is_not_smgs_is_an_engine_error(tmp_path: Path, answer: str) -> None:
    async def workers(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/workers", workers)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = SmgSettings("127.0.0.1", runner.addresses[0][1], 1, "manual", 10.0, 1.0)
    process = smg_process.SmgProcess(settings, "", tmp_path / "smg.log")
    try:
        with pytest.raises(EngineError, match="engine_reply: smg GET /workers"):
            await process.engines()
    finally:
        await process.close()
        await runner.cleanup()


async def test_a_keeper_that_dies_while_an_engine_is_away_comes_back_without_it(tmp_path: Path) -> None:
    async with rig("smg", tmp_path) as made:
        stays, goes = made.servers
        await goes.stop()  # nobody has noticed yet
        os.kill(made.gateway._smg_group.pid(0), signal.SIGKILL)
        await until(lambda: made.gateway._worker_restarts == 1)
        await until(lambda: made.gateway._smg_state.get("engines") == [stays.url])
        (spec,) = await made.open("a")
        await made.say("a")
        assert (await made.gateway.close_session(spec.try_id)).stop is None
        await goes.start()
        await until(lambda: len(made.gateway._smg_state["engines"]) == 2)


async def test_an_smg_that_hangs_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smg_process, "CALL_TIMEOUT_S", 1.0)
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker:
        pid = worker.state()["pid"]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: worker.state()["smg_restarts"] == 1 and worker.state()["engines"] == [server.url])
        assert not alive(pid)


async def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url], stop_timeout_s=0.5) as worker:
        pid = worker.state()["pid"]
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        await worker.close()
        assert 0.4 < time.monotonic() - began < 5
        assert not alive(pid)


async def test_sigterm_lets_open_requests_finish(tmp_path: Path) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url], stop_timeout_s=15.0) as worker:
        server.model.delay_s = 1.0
        client = HttpEngine(worker.url(), api_key="k")
        asking = asyncio.create_task(client.generate([1, 2, 3], sampling_params(Sampling(), 4, 1), "r"))
        await asyncio.sleep(0.3)
        closing = asyncio.create_task(worker.close())
        assert len((await asking)["output_ids"]) >= 1
        await client.close()
        await closing


def test_nothing_is_left_when_the_driver_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from rl360.gateway.smg_worker import SmgWorker\n"
        "from rl360.gateway.ports import free_port\n"
        "async def main():\n"
        f"    worker = SmgWorker(0, [], '127.0.0.1', free_port(), free_port(), {str(tmp_path)!r}, smg_key='k')\n"
        "    await worker.start()\n"
        "    print(worker.state()['pid'], flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert alive(pid)
        driver.kill()
    until_s = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not alive(pid)


# ---- its start


async def test_two_on_one_machine(tmp_path: Path) -> None:
    async with (
        servers(1) as (server,),
        keeper(tmp_path / "a", [server.url]) as one,
        keeper(tmp_path / "b", [server.url]) as two,
    ):
        assert one.url() != two.url()


async def test_a_clusters_proxy_is_not_asked_for_our_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With http_proxy set, SMG asked there for every engine, and registered none."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with rig("smg", tmp_path) as made:
        await made.gateway.verify()
        await made.open("a")
        await made.say("a")


async def test_metrics_have_a_port_of_their_own(tmp_path: Path) -> None:
    port = free_port()
    async with servers(1) as (server,), keeper(tmp_path, [server.url], metrics_port=port) as worker:
        client = HttpEngine(worker.url(), api_key="k")
        await client.generate([1, 2, 3], sampling_params(Sampling(), 4, 1), "r")
        await client.close()

        def read() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
                return str(response.read().decode())

        assert 'smg_router_requests_total{router_type="http"' in await asyncio.to_thread(read)


async def test_an_engine_that_does_not_come_is_named_within_the_deadline(tmp_path: Path) -> None:
    missing = f"http://127.0.0.1:{free_port()}"
    async with servers(1) as (server,):
        with pytest.raises(InfrastructureError, match=rf"smg_start: .*lacks engines: {missing}: nobody listens there"):
            async with keeper(tmp_path, [server.url, missing], start_timeout_s=3.0):
                pass


async def test_a_taken_port_is_told(tmp_path: Path) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker:
        port = int(worker.url().rpartition(":")[2])
        with pytest.raises(InfrastructureError, match=rf"smg_start: port {port} on 127.0.0.1 cannot be used"):
            async with keeper(tmp_path / "other", [server.url], port=port):
                pass


async def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    made = make("smg", tmp_path, ["http://127.0.0.1:9"])
    with pytest.raises(ConfigError, match=r"gateway=smg: the package smg is not installed.*rl360\[cluster\]"):
        await made.start()
    await made.close()


async def test_nobody_without_the_key_changes_its_engines(tmp_path: Path) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker, aiohttp.ClientSession() as client:
        for method, path in (
            ("POST", "/workers"),
            ("GET", "/workers"),
            ("POST", "/generate"),
            ("POST", "/flush_cache"),
        ):
            async with client.request(method, worker.url() + path, json={"url": "http://evil:1"}) as response:
                assert response.status == 401, path


def test_nothing_in_it_retries_or_leaves_engines_out() -> None:
    settings = SmgSettings("127.0.0.1", 1, 2, "manual", 3000.0, 10.0, ("--log-level", "info"))
    arguments = launch_arguments(settings)
    for flag in ("--disable-retries", "--disable-circuit-breaker", "--disable-worker-overload-protection"):
        assert flag in arguments
    value = dict(pairwise(arguments))
    assert value["--request-timeout-secs"] == "6000"
    assert value["--assignment-mode"] == "min_load"
    assert int(value["--worker-wedge-secs"]) > 10**6
    assert value["--max-concurrent-requests"] == "0"
    assert arguments[-2:] == ["--log-level", "info"]
    assert "--assignment-mode" not in launch_arguments(SmgSettings("h", 1, 2, "consistent_hashing", 1.0, 1.0))


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_smg_passes_an_engines_failure_on_and_tries_no_other(tmp_path: Path, status: int) -> None:
    async with servers(2) as both, keeper(tmp_path, [server.url for server in both]) as worker:
        client = HttpEngine(worker.url(), api_key="k")
        for server in both:
            server.model.faults.append(Fault("status", status))
        code, raw, headers = await client.exchange(
            "POST", "/generate", {"input_ids": [1], "sampling_params": {}}, 5.0, routing_key("s")
        )
        await client.close()
        assert (code, json.loads(raw)) == (status, {"error": {"message": "injected"}})
        assert sum(server.model.num_requests for server in both) == 1
        assert headers["x-smg-routed-worker-id"] in [server.url for server in both]


# ---- fields that a hop loses


@asynccontextmanager
async def relay(target: str, mangle: Callable[[dict[str, Any]], Any] | None = None, **how: Any) -> AsyncIterator[str]:
    """A reverse proxy that changes what passes it. mangle: the reply; request: the request; cut: bytes of the reply."""

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if "request" in how:
            body = json.dumps(how["request"](json.loads(body))).encode()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        async with (
            aiohttp.ClientSession() as client,
            client.post(target + request.path, data=body, headers=headers) as r,
        ):
            raw, status = await r.read(), r.status
            kept = {k: v for k, v in r.headers.items() if k.lower().startswith("x-smg")}
        if mangle is not None:
            reply = json.loads(raw)
            mangle(reply)
            raw = json.dumps(reply).encode()
        return web.Response(
            body=raw[: how.get("cut", len(raw))], status=status, headers=kept, content_type="application/json"
        )

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def without(path: str) -> Callable[[dict[str, Any]], Any]:
    where, _, name = path.rpartition(".")
    return lambda body: (body[where] if where else body).pop(name)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"mangle": without("meta_info.weight_version")}, "meta_info.weight_version is missing"),
        ({"mangle": without("meta_info.output_token_logprobs")}, "meta_info.output_token_logprobs is missing"),
        ({"mangle": without("meta_info.finish_reason")}, "meta_info.finish_reason is missing"),
        ({"mangle": without("output_ids")}, "output_ids is missing"),
        ({"mangle": without("meta_info.something_new")}, "meta_info.something_new is missing"),
        ({"request": lambda body: {**body, "input_ids": body["input_ids"][:5]}}, "got 5 prompt ids, 48 were sent"),
        ({"request": lambda body: {**body, "rid": "another"}}, "meta_info.id is 'another'"),
        (
            {"request": lambda body: {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 2}}},
            "2 tokens",
        ),
        ({"cut": 200}, "200 bytes are no JSON"),
    ],
)
async def test_the_hop_that_loses_something_is_named(tmp_path: Path, how: dict[str, Any], says: str) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker, relay(worker.url(), **how) as url:
        proxy = ProxyWorker(
            0, [server.url], write_folder(tmp_path / "model"), log_dir=tmp_path / "logs", smg_url=url, smg_key="k"
        )
        await proxy.start()
        try:
            with pytest.raises(EngineError, match=f"smg at {url}.*{says}") as caught:
                await proxy.verify()
            assert server.url in str(caught.value)  # asked directly, it answers completely
            assert f"engine {server.url}:" not in str(caught.value)
        finally:
            await proxy.close()


async def test_a_relay_that_loses_nothing_passes(tmp_path: Path) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker, relay(worker.url()) as url:
        folder = write_folder(tmp_path / "model")
        proxy = ProxyWorker(0, [server.url], folder, log_dir=tmp_path / "logs", smg_url=url, smg_key="k")
        await proxy.start()
        assert await proxy.verify() == [server.url]
        await proxy.close()


# ---- the route


async def test_smg_that_stays_away_fails_the_turn_with_its_own_cause() -> None:
    gone = HttpEngine(f"http://127.0.0.1:{free_port()}")
    route = SmgRoute(gone, [], 5.0, gone_for_s=0.5)
    with pytest.raises(EngineError, match="smg") as caught:
        await route.ask("s", "s.0.0", IdText().of(array("i", [1])), {})
    assert caught.value.cause == "smg_refused"
    assert route.counts()["engine_resends"] >= 2
    await route.close()


async def test_no_engine_at_all_is_waited_for(tmp_path: Path) -> None:
    async with servers(1) as (server,), keeper(tmp_path, [server.url]) as worker:
        await worker.set_engines([])
        route = SmgRoute(HttpEngine(worker.url(), api_key="k"), [], 20.0)
        params = sampling_params(Sampling(), 4, 1)
        asking = asyncio.create_task(route.ask("s", "s.0.0", IdText().of(array("i", [1, 2])), params))
        await asyncio.sleep(0.5)
        assert not asking.done()
        assert server.model.num_requests == 0
        assert await worker.set_engines([server.url]) == [server.url]  # SMG forgets an engine only after 5 s
        assert (await asking).engine_url == server.url
        await route.close()


def test_any_try_id_makes_a_header() -> None:
    (value,) = routing_key("i00003-task/é 1-2\n.t0").values()
    assert value.isalnum()
    assert routing_key("a") != routing_key("b")
