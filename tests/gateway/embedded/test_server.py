"""The HTTP protocol. What takes `url` holds for any SGLang server, and is marked `contract`: RL360_SGLANG_URL runs it
against a real one."""

from __future__ import annotations

import asyncio
import json
import os
import time

import aiohttp
import pytest
import torch

from rl360.errors import EngineError, InfrastructureError
from rl360.gateway.embedded.server import EngineServer
from rl360.gateway.engine_client import HttpEngine, reply_problem
from rl360.gateway.generation import read_reply
from rl360.models.loading import load_decoder, save_hf

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
REAL_URL = os.environ.get("RL360_SGLANG_URL")


@pytest.fixture
def server(make_engine):
    server = EngineServer(make_engine(start=False, version=2))
    server.start()
    yield server
    server.close()


@pytest.fixture(
    params=[pytest.param(of, marks=pytest.mark.contract) for of in ("embedded", *(["sglang"] if REAL_URL else []))]
)
def url(request):
    """Of a server to which the test may say what it says to any; every test that takes it carries the marker."""
    return request.getfixturevalue("server").url if request.param == "embedded" else REAL_URL


async def call(url, path, body=None, method="POST"):
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        session.request(method, url + path, json=body) as response,
    ):
        raw = await response.read()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, raw.decode()


def body(**changes):
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True, **changes.pop("sampling_params", {})}
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **changes}


async def test_generate(url):
    status, reply = await call(url, "/generate", body(rid="contract-1"))
    assert status == 200
    assert reply_problem(reply) is None
    meta = reply["meta_info"]
    assert meta["id"] == "contract-1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (8, 6)
    assert len(reply["output_ids"]) == 6
    assert isinstance(reply["text"], str)
    assert isinstance(meta["weight_version"], str)
    assert isinstance(meta["cached_tokens"], int)
    again = (await call(url, "/generate", body()))[1]
    assert again["output_ids"] == reply["output_ids"]


async def test_list_input(url):
    _, single = await call(url, "/generate", body())
    many = body(input_ids=[PROMPT, PROMPT[:3]], rid=["contract-2", "contract-3"])
    status, replies = await call(url, "/generate", many)
    assert status == 200
    assert [reply["meta_info"]["id"] for reply in replies] == ["contract-2", "contract-3"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [8, 3]
    assert replies[0]["output_ids"] == single["output_ids"]


async def test_stop_token_is_in_the_ids(url):
    _, free = await call(url, "/generate", body())
    token = free["output_ids"][3]
    expected = free["output_ids"][: free["output_ids"].index(token) + 1]
    changes = {"stop_token_ids": [token], "ignore_eos": False}
    _, reply = await call(url, "/generate", body(sampling_params=changes))
    assert reply["output_ids"] == expected
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


async def test_stop_regex(url):
    changes = {"stop_regex": r"[\s\S]{2}", "max_new_tokens": 30}
    _, reply = await call(url, "/generate", body(sampling_params=changes))
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"[\s\S]{2}"}
    assert 1 <= len(reply["output_ids"]) < 30


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"top_p": 0}},
        {"sampling_params": {"min_new_tokens": 9}},
        {"input_ids": None},
        {"input_ids": [3] * 2_000_000},
    ],
)
async def test_bad_request(url, changes):
    status, reply = await call(url, "/generate", body(**changes))
    assert status in (400, 422)
    assert "message" in (reply.get("error") or reply)


async def test_streaming_ends_as_the_plain_reply(url):
    _, plain = await call(url, "/generate", body())
    events = []
    async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body(stream=True)) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: "):
                events.append(line[6:].strip())
    assert events[-1] == b"[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert parts[-1]["output_ids"] == plain["output_ids"]
    assert parts[-1]["text"] == plain["text"]
    assert [p["meta_info"]["finish_reason"] is None for p in parts] == [True] * (len(parts) - 1) + [False]


async def test_a_flush_can_wait_until_requests_have_ended(url):
    short = asyncio.create_task(
        call(url, "/generate", body(rid="contract-5", sampling_params={"max_new_tokens": 100, "ignore_eos": True}))
    )
    await asyncio.sleep(0.05)
    assert (await call(url, "/flush_cache?timeout=30", {}))[0] == 200
    assert (await asyncio.wait_for(short, 5))[0] == 200


async def test_abort_hands_back_what_there_is(url):
    long = asyncio.create_task(
        call(url, "/generate", body(rid="contract-4", sampling_params={"max_new_tokens": 900, "temperature": 1.0}))
    )
    await asyncio.sleep(0.05)
    assert (await call(url, "/flush_cache", {}))[0] == 400
    assert (await call(url, "/abort_request", {"rid": "contract-4"}))[0] == 200
    _, reply = await long
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == meta["completion_tokens"] == len(meta.get("output_token_logprobs", []))
    assert meta["completion_tokens"] < 900


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_and_continue(url, mode):
    request = body(rid=f"contract-5-{mode}", sampling_params={"max_new_tokens": 200})
    running = asyncio.create_task(call(url, "/generate", request))
    await asyncio.sleep(0.03)
    try:
        assert (await call(url, "/pause_generation", {"mode": mode}))[0] == 200
        queued = asyncio.create_task(call(url, "/generate", body()))
        await asyncio.sleep(0.05)
        assert not queued.done()
    finally:
        assert (await call(url, "/continue_generation", {}))[0] == 200
    _, reply = await running
    if mode == "abort":
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert len(reply["output_ids"]) == 200
    assert len((await queued)[1]["output_ids"]) == 6


async def test_information(url):
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        status, info = await call(url, path, method="GET")
        assert status == 200
        assert isinstance(info, dict)
    _, model = await call(url, "/model_info", method="GET")
    assert {"model_path", "tokenizer_path", "is_generation", "weight_version"} <= model.keys()
    assert (await call(url, "/health", method="GET"))[0] == 200


async def test_weights_from_disk(server, tiny_folder, tmp_path):
    before = (await call(server.url, "/generate", body()))[1]
    folder = save_hf(load_decoder(tiny_folder, random_init_seed=3), tmp_path / "new", source=tiny_folder)
    request = {"model_path": str(folder), "weight_version": "8", "flush_cache": True}
    status, reply = await call(server.url, "/update_weights_from_disk", request)
    assert (status, reply["success"]) == (200, True)
    after = (await call(server.url, "/generate", body()))[1]
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "8"
    assert after["meta_info"]["weight_versions"] == [{"version": 8, "start": 0, "end": 6}]
    assert after["meta_info"]["cached_tokens"] == 0

    request = {"model_path": str(tmp_path / "nowhere"), "weight_version": "9"}
    status, reply = await call(server.url, "/update_weights_from_disk", request)
    assert (status, reply["success"]) == (400, False)
    assert "nowhere" in reply["message"]
    assert (await call(server.url, "/model_info", method="GET"))[1]["weight_version"] == "8"


async def test_health_answers_while_paused_and_during_a_step(server, monkeypatch):
    real = server.engine.decoder.hidden

    def slow(*args):
        time.sleep(0.5)
        return real(*args)

    monkeypatch.setattr(server.engine.decoder, "hidden", slow)
    request = asyncio.create_task(call(server.url, "/generate", body(sampling_params={"max_new_tokens": 2})))
    await asyncio.sleep(0.05)
    pause = asyncio.create_task(call(server.url, "/pause_generation", {"mode": "in_place"}))
    waits = []
    for _ in range(10):
        start = time.perf_counter()
        assert (await call(server.url, "/health", method="GET"))[0] == 200
        waits.append(time.perf_counter() - start)
    await pause
    assert (await call(server.url, "/health", method="GET"))[0] == 200
    assert max(waits) < 0.4
    await call(server.url, "/continue_generation", {})
    await request
    await asyncio.to_thread(server.engine.close)
    assert (await call(server.url, "/health", method="GET"))[0] == 503


async def test_a_step_that_fails_is_a_failure_and_no_interruption(server, monkeypatch):
    """It once looked like an abort for new weights: every turn was asked again, until its end, and no reason told."""

    def fail():
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(server.engine, "_step", fail)
    engine = HttpEngine(server.url)
    reply = await engine.generate([1, 2, 3], {"max_new_tokens": 4}, "r")
    await engine.close()
    with pytest.raises(EngineError, match=r"engine_status_500: .*The engine failed: .*illegal memory access"):
        read_reply(reply, server.url)


async def test_a_client_that_leaves_frees_its_row(server):
    request = asyncio.create_task(call(server.url, "/generate", body(sampling_params={"max_new_tokens": 900})))
    await asyncio.sleep(0.05)
    assert server.engine.state()["num_running_reqs"] == 1
    request.cancel()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if server.engine.state()["num_running_reqs"] == 0:
            break
    assert server.engine.state()["num_running_reqs"] == 0
    assert server.engine.state()["generated_tokens"] < 900


async def test_what_is_not_supported_is_refused(server):
    for changes in (
        {"lora_path": "x"},
        {"sampling_params": {"json_schema": "{}"}},
        {"input_ids": [PROMPT], "rid": [1]},
    ):
        status, reply = await call(server.url, "/generate", body(**changes))
        assert status == 400, changes
        assert reply["error"]["message"]
    assert (await call(server.url, "/pause_generation", {"mode": "gently"}))[0] == 400
    assert (await call(server.url, "/abort_request", {}))[0] == 200  # nobody is meant, and nobody ended
    async with aiohttp.ClientSession() as session, session.post(server.url + "/generate", data=b"{") as response:
        assert response.status == 400


async def test_duplicate_rid_is_refused(server):
    first = asyncio.create_task(
        call(server.url, "/generate", body(rid="twice", sampling_params={"max_new_tokens": 300}))
    )
    await asyncio.sleep(0.03)
    status, reply = await call(server.url, "/generate", body(rid="twice"))
    assert status == 400
    assert "twice" in reply["error"]["message"]
    await first
    assert (await call(server.url, "/generate", body(rid="twice")))[0] == 200


async def test_text_prompt(server):
    tokens = server.engine.tokenizer.encode("Hello, w").ids
    _, by_text = await call(server.url, "/generate", {**body(), "input_ids": None, "text": "Hello, w"})
    _, by_ids = await call(server.url, "/generate", body(input_ids=tokens))
    assert by_text["output_ids"] == by_ids["output_ids"]


def test_taken_port_is_reported(server, make_engine):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(InfrastructureError, match=str(port)):
        EngineServer(make_engine(start=False), port=port).start()


async def test_close_answers_open_requests(make_engine):
    server = EngineServer(make_engine(start=False))
    server.start()
    request = asyncio.create_task(call(server.url, "/generate", body(sampling_params={"max_new_tokens": 900})))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(server.close)
    _, reply = await request
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    server.close()  # twice is fine


async def test_http_engine_end_to_end(server, tiny_folder, tmp_path):
    engine = HttpEngine(server.url, request_timeout_s=20)
    reply = await engine.generate(PROMPT, {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}, "e2e")
    with torch.no_grad():
        ids = torch.tensor(PROMPT)
        from rl360.models.decoder import causal_attend

        decoder = server.engine.decoder
        logits = decoder.logits(decoder.hidden(ids, torch.arange(len(PROMPT)), causal_attend()))
    assert reply["output_ids"][0] == int(logits[-1].argmax())
    assert await engine.health()
    assert (await engine.info())["weight_version"] == "2"
    await engine.load(save_hf(decoder, tmp_path / "x", source=tiny_folder), 3)
    assert (await engine.info())["weight_version"] == "3"
    await engine.pause()
    await engine.resume()
    await engine.flush()
    await engine.abort("nobody")
    await engine.abort(None)
    with pytest.raises(EngineError) as caught:
        await engine.generate(PROMPT, {"temperature": -1}, "bad")
    assert caught.value.cause == "engine_status_400"
    assert "temperature" in str(caught.value)
    await engine.close()


async def test_http_engine_deadline_drops_the_request(server):
    engine = HttpEngine(server.url, request_timeout_s=0.1)
    with pytest.raises(EngineError) as caught:
        await engine.generate(PROMPT, {"max_new_tokens": 900, "ignore_eos": True}, "slow")
    assert caught.value.cause == "engine_timeout"
    await asyncio.sleep(0.05)
    assert server.engine.state()["num_running_reqs"] == 0
    await engine.close()


async def test_a_request_that_ends_before_its_first_token_is_no_error(url):
    status, reply = await call(
        url, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    )
    assert status == 200
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert reply["meta_info"]["completion_tokens"] == 0
