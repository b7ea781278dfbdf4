"""The gateway as the driver uses it: a real proxy process in front of a stub engine."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rl360.engine.workers import LocalWorkerGroup
from rl360.errors import ConfigError, EngineError, InfrastructureError, RL360Error
from rl360.gateway import direct
from rl360.gateway.direct import DirectGateway
from rl360.protocols import Gateway
from tests.gateway.kit import attempt_spec, tokenizer_of, write_folder
from tests.gateway.stub_engine import Fault, StubModel, serve
from tests.gateway.test_random_chats import check_truth


@asynccontextmanager
async def gateway(tmp_path: Path, **kwargs: Any) -> AsyncIterator[tuple[DirectGateway, StubModel]]:
    model = StubModel(tokenizer_of(), 3)

    def make_workers(target: str, size: int, kwargs: Any, name: str) -> LocalWorkerGroup:
        return LocalWorkerGroup(target, size, kwargs, name=name, log_dir=tmp_path / "logs")

    async with serve(model) as url:
        made = DirectGateway(
            engine_urls=[url],
            tokenizer_dir=write_folder(tmp_path / "model"),
            worker_group_factory=make_workers,
            log_dir=tmp_path / "logs",
            request_timeout_s=20,
            **kwargs,
        )
        try:
            yield made, model
        finally:
            await made.close()


async def test_from_start_to_close(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (made, model):
        assert isinstance(made, Gateway)
        await made.start()
        assert await made.health()
        await made.verify()
        model.samples.clear()
        specs = [attempt_spec(f"a{i}") for i in range(8)]
        urls = await asyncio.gather(*(made.open(spec) for spec in specs))
        assert len(set(urls)) == 8
        async with aiohttp.ClientSession() as client:

            async def talk(url: str, name: str) -> None:
                messages: list[dict[str, Any]] = [{"role": "user", "content": name}]
                for _ in range(3):
                    async with client.post(f"{url}/chat/completions", json={"messages": messages}) as response:
                        message = (await response.json())["choices"][0]["message"]
                    messages += [message, {"role": "user", "content": "next"}]

            await asyncio.gather(*(talk(url, str(i)) for i, url in enumerate(urls)))
        await made.discard(specs[0].try_id)
        sessions = [await made.close_session(spec.try_id) for spec in specs[1:]]
    for session in sessions:
        (segment,) = session.segments
        mine = [s for s in model.samples if segment.token_ids_T.tolist()[: len(s.prompt)] == list(s.prompt)]
        assert len(mine) == len(session.turns) == 3
        check_truth(session, mine)
    assert len((tmp_path / "logs" / "sessions.jsonl").read_text().splitlines()) == 9  # verify's own is one


async def test_health_answers_while_long_histories_are_worked_on(tmp_path: Path) -> None:
    text = "def solve(x): return x + 1\n" * 2000
    async with gateway(tmp_path) as (made, _), aiohttp.ClientSession() as client:
        await made.start()
        health_url = f"{await made._group.call(0, 'url')}/health"
        urls = [await made.open(attempt_spec(f"a{i}", max_context_tokens=10**7)) for i in range(24)]

        async def ask(url: str) -> int:
            body = {"messages": [{"role": "user", "content": text}]}
            async with client.post(f"{url}/chat/completions", json=body) as response:
                return response.status

        asking = asyncio.gather(*(ask(url) for url in urls))
        waits = await asyncio.to_thread(_time_health, health_url, asking)
        assert set(await asking) == {200}
    assert statistics.median(waits) < 1.0, waits


def _time_health(url: str, asking: asyncio.Future[Any]) -> list[float]:
    """Seconds of each health call until `asking` is done; from a thread, so that this process's loop does not count."""
    waits = []
    while not asking.done():
        began = time.monotonic()
        with urllib.request.urlopen(url, timeout=30) as response:
            assert response.status == 200
        waits.append(time.monotonic() - began)
        time.sleep(0.01)
    return waits


@pytest.mark.parametrize("field", ["meta_info.weight_version", "meta_info.output_token_logprobs"])
async def test_verify_fails_on_what_training_would_miss(tmp_path: Path, field: str) -> None:
    async with gateway(tmp_path) as (made, model):
        await made.start()
        model.faults.append(Fault("drop", field=field))
        with pytest.raises(EngineError, match=field.split(".")[1]):
            await made.verify()
        await made.verify()


async def test_a_missing_model_folder_is_told_at_start(tmp_path: Path) -> None:
    async with gateway(tmp_path, tool_parser="none") as (made, _):
        (tmp_path / "model" / "tokenizer.json").unlink()
        with pytest.raises((ConfigError, RL360Error), match=r"tokenizer.json: not found"):
            await made.start()


async def test_a_killed_proxy_is_started_again_without_its_sessions(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (made, _):
        await made.start()
        before = attempt_spec("before")
        old_url = await made.open(before)
        os.kill(made._group.pid(0), signal.SIGKILL)  # type: ignore[attr-defined]
        specs = [attempt_spec(f"after{i}") for i in range(4)]
        urls = await asyncio.gather(*(made.open(spec) for spec in specs))
        assert made._lives == 1  # one new proxy for all that found the old one dead
        with pytest.raises(InfrastructureError, match="proxy_session_lost"):
            await made.close_session(before.try_id)
        await made.discard(before.try_id)
        async with aiohttp.ClientSession() as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            async with client.post(f"{urls[0]}/chat/completions", json=body) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await client.post(f"{old_url}/chat/completions", json=body)
        assert len((await made.close_session(specs[0].try_id)).turns) == 1
        assert await made.health()


async def test_a_hanging_proxy_is_replaced(tmp_path: Path) -> None:
    async with gateway(tmp_path, call_timeout_s=1.0) as (made, _):
        await made.start()
        spec = attempt_spec()
        await made.open(spec)
        os.kill(made._group.pid(0), signal.SIGSTOP)  # type: ignore[attr-defined]
        with pytest.raises(InfrastructureError, match="proxy_timeout"):
            await made.close_session(spec.try_id)
        assert await made.health()
        with pytest.raises(InfrastructureError, match="proxy_session_lost"):
            await made.close_session(spec.try_id)


@pytest.mark.parametrize("lost", ["release", "set_engines"])
async def test_what_a_proxy_that_stood_still_did_not_hear_is_told_again(tmp_path: Path, lost: str) -> None:
    """A call that times out is taken back. When it was the release of its requests, they were held for good."""
    async with gateway(tmp_path, call_timeout_s=0.5) as (made, _), aiohttp.ClientSession() as client:
        await made.start()
        url = await made.open(attempt_spec())
        pid = made._group.pid(0)  # type: ignore[attr-defined]
        await (made.hold() if lost == "release" else made.set_engines([]))
        os.kill(pid, signal.SIGSTOP)
        engines = _engines_of(made)
        await (made.release() if lost == "release" else made.set_engines(engines))
        assert made._untold
        os.kill(pid, signal.SIGCONT)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with asyncio.timeout(60), client.post(f"{url}/chat/completions", json=body) as response:
            assert response.status == 200


def _engines_of(made: DirectGateway) -> list[str]:
    kwargs = pickle.loads(made._group._packed_kwargs)  # type: ignore[attr-defined]
    urls: list[str] = kwargs["engine_urls"]
    return urls


async def test_a_proxy_that_goes_on_standing_still_when_it_is_told_again_is_replaced(tmp_path: Path) -> None:
    async with gateway(tmp_path, call_timeout_s=1.0) as (made, _):
        await made.start()
        os.kill(made._group.pid(0), signal.SIGSTOP)  # type: ignore[attr-defined]
        await made.hold()
        await made.release()
        async with asyncio.timeout(60):
            while not made._lives:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_whatever_keeps_a_proxy_from_starting_again_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that was not thought of ended the task that looks after the proxy."""
    monkeypatch.setattr(direct, "FAILED_WATCH_S", 0.1)
    async with gateway(tmp_path) as (made, _):
        await made.start()
        restart, problems = made._group.restart, [OSError(errno.EMFILE, "Too many open files"), KeyError("a bug")]

        def fail_first(rank: int) -> None:
            if problems:
                raise problems.pop()
            restart(rank)

        monkeypatch.setattr(made._group, "restart", fail_first)
        os.kill(made._group.pid(0), signal.SIGKILL)  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while not made._lives:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not problems
        await made.open(attempt_spec())


async def test_a_proxy_that_cannot_be_started_again_says_so(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (made, _):
        await made.start()
        (tmp_path / "model" / "tokenizer.json").unlink()
        os.kill(made._group.pid(0), signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(InfrastructureError, match=r"proxy_start.*tokenizer.json: not found"):
            await made.open(attempt_spec())


async def test_a_release_that_overtakes_the_hold_of_a_new_proxy_is_not_lost(tmp_path: Path) -> None:
    """A synchronisation ends, in its own thread, just as a proxy that was started again is told that it goes on."""

    heard: list[str] = []

    class Slow:
        async def call(self, index: int, method: str, *args: Any, timeout_s: float | None = None) -> Any:
            if method == "hold":
                await made.release()
            heard.append(method)
            return "http://nowhere"

    def make_workers(**kwargs: Any) -> Any:
        return Slow()

    made = DirectGateway(engine_urls=[], tokenizer_dir=tmp_path, worker_group_factory=make_workers, log_dir=tmp_path)
    made._started = made._held = True
    await made._greet()
    assert heard == ["url", "release", "hold", "release"]


async def test_what_the_proxy_is_told_again_never_overtakes_a_hold(tmp_path: Path) -> None:
    """Told again what it had missed, it was released in the middle of a synchronisation."""
    heard: list[str] = []

    class Asking:
        """Another thread holds requests while the first call is on its way."""

        async def call(self, index: int, method: str, *args: Any, timeout_s: float | None = None) -> Any:
            heard.append(method)
            if heard == ["set_engines"]:
                await asyncio.to_thread(lambda: asyncio.run(made.hold()))

    def make_workers(**kwargs: Any) -> Any:
        return Asking()

    made = DirectGateway(engine_urls=[], tokenizer_dir=tmp_path, worker_group_factory=make_workers, log_dir=tmp_path)
    made._engine_urls = []
    made._started = made._untold = True
    await made._tell_again(0)
    assert set(heard) == {"set_engines", "hold"}
    assert not made._untold
