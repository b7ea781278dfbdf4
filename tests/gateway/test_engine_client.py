"""What the engine client makes of engines that refuse, hang, fail or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rl360.errors import EngineError
from rl360.gateway.engine_client import HttpEngine, reply_problem
from rl360.protocols import Engine

GOOD = {
    "text": "hi",
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 6},
        "output_token_logprobs": [[-0.5, 5, None], [0.0, 6, None]],
        "weight_version": "0",
    },
}


@asynccontextmanager
async def serving(handler):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_bytes(data):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def cause(url, call=lambda e: e.generate([1], {}, "r"), **kwargs):
    engine = HttpEngine(url, **{"request_timeout_s": 5.0, "control_timeout_s": 0.3, **kwargs})
    try:
        with pytest.raises(EngineError) as caught:
            await call(engine)
        assert url in str(caught.value)
        return caught.value.cause
    finally:
        await engine.close()


def test_is_an_engine():
    assert isinstance(HttpEngine("http://x"), Engine)


async def test_refused():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert await cause(url) == "engine_refused"
        assert not await HttpEngine(url).health()


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nContent-Le"])
async def test_connection_that_breaks_before_an_answer(data):
    async with raw_bytes(data) as url:
        assert await cause(url) in ("engine_refused", "engine_reply")


@pytest.mark.parametrize(
    "data", [b"SMTP hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"\x00\xff\x16\x03" * 40]
)
async def test_broken_answer(data):
    async with raw_bytes(data) as url:
        assert await cause(url) == "engine_reply"


async def test_every_call_has_a_deadline():
    seen = []

    async def hang(request):
        seen.append((request.path, await request.json() if request.can_read_body else None))
        await asyncio.sleep(30)

    async with serving(hang) as url:
        calls = {
            "generate": lambda e: e.generate([1], {}, "r7"),
            "load": lambda e: e.load("/x", 1),
            "flush": lambda e: e.flush(),
            "abort": lambda e: e.abort(None),
            "pause": lambda e: e.pause(),
            "resume": lambda e: e.resume(),
            "info": lambda e: e.info(),
        }
        for name, call in calls.items():
            start = time.perf_counter()
            kwargs = {"request_timeout_s": 0.1, "control_timeout_s": 0.1, "load_timeout_s": 0.1}
            assert await cause(url, call, **kwargs) == "engine_timeout", name
            assert time.perf_counter() - start < 20
        assert ("/abort_request", {"rid": "r7", "abort_all": False}) in seen
        assert not await HttpEngine(url, control_timeout_s=0.1).health()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_status(status):
    async def fail(request):
        return web.json_response({"error": {"message": "no luck"}}, status=status)

    async with serving(fail) as url:
        assert await cause(url) == f"engine_status_{status}"
        assert await cause(url, lambda e: e.flush()) == f"engine_status_{status}"
        engine = HttpEngine(url)
        with pytest.raises(EngineError, match="no luck"):
            await engine.abort("x")
        await engine.close()


@pytest.mark.parametrize("text", ["", "null", "[]", "<html>busy</html>", '{"output_ids": [1]}'])
async def test_garbage(text):
    async def answer(request):
        return web.Response(text=text)

    async with serving(answer) as url:
        assert await cause(url) == "engine_reply"
        assert await cause(url, lambda e: e.info()) == "engine_reply"
        assert await cause(url, lambda e: e.load("/x", 1)) == "engine_reply"


async def test_older_engines_answer_get_model_info():
    async def answer(request):
        if request.path == "/get_model_info":
            return web.json_response({"weight_version": "4", "model_path": "m"})
        return web.json_response({"a": 1}) if request.path == "/get_server_info" else web.Response(status=404)

    async with serving(answer) as url:
        engine = HttpEngine(url)
        assert await engine.info() == {"weight_version": "4", "model_path": "m", "a": 1}
        await engine.close()


async def test_what_is_sent():
    seen = []

    async def answer(request):
        seen.append((request.path, request.headers.get("Authorization"), await request.json()))
        return web.json_response({**GOOD, "success": True})

    async with serving(answer) as url:
        engine = HttpEngine(url + "/", api_key="secret")
        await engine.generate((1, 2), {"temperature": 1.0, "sampling_seed": 3}, "r")
        await engine.load("/weights", 12)
        await engine.pause()
        await engine.resume()
        await engine.close()
    assert seen == [
        (
            "/generate",
            "Bearer secret",
            {
                "input_ids": [1, 2],
                "sampling_params": {"temperature": 1.0, "sampling_seed": 3},
                "return_logprob": True,
                "rid": "r",
                "stream": False,
            },
        ),
        (
            "/update_weights_from_disk",
            "Bearer secret",
            {"model_path": "/weights", "load_format": "auto", "weight_version": "12", "flush_cache": True},
        ),
        ("/pause_generation", "Bearer secret", {"mode": "abort"}),
        ("/continue_generation", "Bearer secret", {}),
    ]


def changed(**meta):
    return {**GOOD, "meta_info": {**GOOD["meta_info"], **meta}}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({**GOOD, "output_ids": None}, "output_ids"),
        ({**GOOD, "output_ids": [1, "2"]}, "output_ids"),
        ({**GOOD, "output_ids": [5]}, "one .* for each id"),
        ({**GOOD, "output_ids": [5, 7]}, r"\[1\].*expected the logprob of id 7"),
        (changed(finish_reason=None), "finish_reason"),
        (changed(finish_reason={"type": "magic"}), "finish_reason"),
        (changed(output_token_logprobs=None), "for each id"),
        (changed(output_token_logprobs=[[-0.5, 5, None], [float("nan"), 6, None]]), "finite logprob"),
        (changed(output_token_logprobs=[[-0.5, 5, None], [0.5, 6, None]]), "finite logprob"),
        (changed(output_token_logprobs=[[-0.5, 5, None], [None, 6, None]]), "finite logprob"),
    ],
)
def test_replies_that_cannot_be_trained_on(reply, words):
    import re

    assert reply_problem(GOOD) is None
    assert re.search(words, reply_problem(reply))


def test_reply_without_tokens_needs_no_logprobs():
    empty = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "0"}}
    assert reply_problem(empty) is None


async def test_a_process_without_room_for_a_connection_does_not_blame_the_engine():
    async def answer(request):
        return web.json_response(GOOD)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    async with serving(answer) as url:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    kept.append(os.dup(0))
            said = await cause(url)
        finally:
            for handle in kept:
                os.close(handle)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said == "host_io"
