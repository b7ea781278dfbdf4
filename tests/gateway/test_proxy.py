"""The proxy over HTTP, in this process, in front of the stub engine over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rl360.errors import ConfigError, EngineError, InfrastructureError
from rl360.gateway.proxy import ProxyWorker
from rl360.types import Stop
from tests.gateway.kit import TOOLS, attempt_spec, tokenizer_of, write_folder
from tests.gateway.stub_engine import Fault, StubModel, serve
from tests.gateway.test_random_chats import CALL, check_truth

HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def proxy(tmp_path: Path, **kwargs: Any) -> AsyncIterator[tuple[ProxyWorker, StubModel, aiohttp.ClientSession]]:
    model = StubModel(tokenizer_of(), 3)
    async with serve(model) as url, aiohttp.ClientSession() as client:
        folder = write_folder(tmp_path / "model")
        worker = ProxyWorker(0, [url], folder, tool_parser="hermes", log_dir=tmp_path / "logs", **kwargs)
        await worker.start()
        try:
            yield worker, model, client
        finally:
            await worker.close()


async def chat(client: aiohttp.ClientSession, base_url: str, **fields: Any) -> tuple[int, Any]:
    async with client.post(f"{base_url}/chat/completions", json={"messages": HELLO, **fields}) as response:
        return response.status, await response.json()


async def test_a_session_from_open_to_log(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (worker, model, client):
        base_url = worker.open(attempt_spec("i00003-task/é 1-2"))
        status, payload = await chat(client, base_url)
        assert status == 200
        said = payload["choices"][0]["message"]
        status, _ = await chat(client, base_url, messages=[*HELLO, said, *HELLO])
        assert status == 200
        session = await worker.close_session("i00003-task/é 1-2.t0")
        assert (await chat(client, base_url))[0] == 404
        with pytest.raises(InfrastructureError, match="proxy_session_lost"):
            await worker.close_session("i00003-task/é 1-2.t0")
    check_truth(session, model.samples)
    assert len(session.segments) == 1
    (line,) = (tmp_path / "logs" / "sessions.jsonl").read_text().splitlines()
    row = json.loads(line)
    ids = np.array([i for sample in model.samples for i in sample.ids], dtype="<i4")
    assert row["try_id"] == "i00003-task/é 1-2.t0"
    assert (row["turns"], row["sampled_tokens"], row["discarded"]) == (2, ids.size, False)
    assert row["segments"][0]["sampled_sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()
    assert row["segments"][0]["versions"] == [0]


async def test_streaming_says_the_same(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (worker, model, client):
        base_url = worker.open(attempt_spec(max_new_tokens=500))
        model.script.append(f"look\n{CALL}\n{CALL}")
        _, payload = await chat(client, base_url, tools=TOOLS)
        body = {"messages": HELLO, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line.decode().strip() async for line in response.content if line.strip()]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    message = payload["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"] == "look"
    calls = [{k: v for k, v in c.items() if k != "index"} for delta in deltas for c in delta.get("tool_calls", [])]
    assert calls == message["tool_calls"]
    assert len(calls) == 2
    assert chunks[-1]["usage"] == payload["usage"]
    assert model.num_requests == 1


async def test_errors_have_openais_shape(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (worker, model, client):
        base_url = worker.open(attempt_spec(max_turns=1))
        for fields in ({"n": 2}, {"messages": []}):
            assert (await chat(client, base_url, **fields))[0] == 400
        model.faults.append(Fault("status", 500))
        status, body = await chat(client, base_url)
        assert (status, body["error"]["code"], body["error"]["type"]) == (502, "engine_status_500", "server_error")
        assert (await chat(client, base_url))[0] == 200
        status, body = await chat(client, base_url, messages=[{"role": "user", "content": "other"}])
        code = body["error"]["code"]
        assert (status, code) == (400, "context_length_exceeded")
        status, body = await chat(client, worker.url() + "/s/nobody/v1")
        assert (status, body["error"]["code"]) == (404, "session_not_found")
        async with client.get(f"{base_url}/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        assert (await worker.close_session("a0.t0")).stop is Stop.TURNS


async def test_a_client_that_disconnects_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (worker, model, client):
        base_url = worker.open(attempt_spec())
        model.delay_s = 0.5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await chat(client, base_url)
        await asyncio.sleep(0.8)
        assert model.num_requests == 1
        session = await worker.close_session("a0.t0")
    assert (session.segments, session.turns) == ((), ())
    assert session.engine_wait_s == pytest.approx(0.1, abs=0.08)  # nobody waited for the rest


async def test_a_discarded_session_is_logged_as_such(tmp_path: Path) -> None:
    async with proxy(tmp_path) as (worker, model, client):
        base_url = worker.open(attempt_spec())
        with pytest.raises(ValueError, match="already open"):
            worker.open(attempt_spec())
        model.delay_s = 60
        asking = asyncio.create_task(chat(client, base_url))
        await asyncio.sleep(0.1)
        await worker.discard("a0.t0")
        assert (await asking)[0] == 404
        await worker.discard("a0.t0")
        await asyncio.sleep(0.1)
        assert model.aborted == ["a0.t0.0.0"]
    assert json.loads((tmp_path / "logs" / "sessions.jsonl").read_text())["discarded"] is True


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("drop", field="meta_info.output_token_logprobs"), "output_token_logprobs"),
        (Fault("drop", field="meta_info.weight_version"), "weight_version"),
        (Fault("drop", field="meta_info.finish_reason"), "finish_reason"),
        (Fault("drop", field="output_ids"), "output_ids"),
        (Fault("drop", field="meta_info"), "meta_info"),
        (Fault("abort", keep=1), "is it paused"),
        (Fault("status", 401), "engine_status_401"),
    ],
)
async def test_verify_names_what_is_missing(tmp_path: Path, fault: Fault, says: str) -> None:
    async with proxy(tmp_path) as (worker, model, _):
        assert await worker.verify() == [worker._engines[0].url]
        model.faults.append(fault)
        with pytest.raises(EngineError, match=says):
            await worker.verify()


def test_bad_settings_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine_urls: empty"):
        ProxyWorker(0, [], tmp_path)
    with pytest.raises(ConfigError, match=r"gateway.api_key_env: RL360_NO_SUCH_KEY is not set"):
        ProxyWorker(0, ["http://x"], tmp_path, api_key_env="RL360_NO_SUCH_KEY")
    with pytest.raises(ConfigError, match=r"model.tool_parser: unknown parser 'hermse'.*did you mean hermes"):
        ProxyWorker(0, ["http://x"], tmp_path, tool_parser="hermse")


def test_the_proxy_imports_no_torch() -> None:
    code = (
        "import sys, rl360.gateway.proxy; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'harbor')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
