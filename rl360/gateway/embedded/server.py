"""SGLang's HTTP protocol in front of the embedded engine, on a thread and an event loop of its own.

In: the requests that SGLang 0.5.16 takes (the part of them that RL360 uses). Out: replies with its field names, status
codes and error bodies. What is computed is left to the engine. The event loop never waits for a step: control calls,
which do, run on helper threads, so that /health answers at once whatever the engine is doing.

Differs from SGLang on purpose: /health does not generate (a paused engine is alive), `abort_request` takes a whole rid
and not a prefix, `meta_info.weight_versions` is there (SGLang has it from 0.5.20), an unknown sampling parameter is
400 and not 500, and what a malformed weight call does is 400 and not the end of the server.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rl360.errors import InfrastructureError, RL360Error
from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.request import Request
from rl360.gateway.embedded.sampling import SamplingParams
from rl360.gateway.embedded.weights import WeightReceiver

# Request bodies of long contexts: a million tokens of JSON take about 7 MiB.
MAX_BODY_BYTES = 64 * 2**20
START_TIMEOUT_S = 30.0
FLUSH_POLL_S = 0.02
# Fields of /generate that are understood; others are an error when they ask for something.
_UNDERSTOOD = {"text", "input_ids", "sampling_params", "rid", "return_logprob", "stream"}
_IGNORED = {"logprob_start_len", "return_text_in_logprobs", "top_logprobs_num", "log_metrics", "model"}

logger = logging.getLogger(__name__)


class EngineServer:
    """Serves one engine. `start` also starts the engine's thread; `close` ends both. `api_key`: as in SGLang, whoever
    does not name it gets 401 everywhere but at /health and /metrics."""

    def __init__(
        self, engine: EmbeddedEngine, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None
    ) -> None:
        self.engine = engine
        self.url = ""
        self._host, self._port = host, port
        self._api_key = api_key
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._open: set[str] = set()  # rids, event loop only
        self._background: set[asyncio.Task[Any]] = set()
        self._weights = WeightReceiver(engine)

    def start(self) -> str:
        """Returns `http://host:port`. Raises `InfrastructureError` when the port is taken or the start is too slow."""
        self.engine.start()
        started = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(started))
            except BaseException as error:
                failure.append(error)
                started.set()

        self._thread = threading.Thread(target=run, name="engine-server", daemon=True)
        self._thread.start()
        if not started.wait(START_TIMEOUT_S):
            raise InfrastructureError("engine_start", f"the engine's server did not start in {START_TIMEOUT_S:.0f} s")
        if failure:
            raise InfrastructureError("engine_start", f"cannot serve on {self._host}:{self._port}: {failure[0]}")
        return self.url

    def close(self) -> None:
        self.engine.close()  # aborts what is open, so that every handler can answer
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)
            self._thread = None
        self._weights.close()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://{self._host}:{port}"
            started.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, _asks_for(self._api_key)])
        for method, paths, handler in (
            ("*", ("/generate",), self._generate),
            ("GET", ("/health", "/health_generate", "/ping"), self._health),
            ("GET", ("/server_info", "/get_server_info"), self._server_info),
            ("GET", ("/model_info", "/get_model_info"), self._model_info),
            ("*", ("/flush_cache",), self._flush_cache),
            ("POST", ("/pause_generation",), self._pause),
            ("POST", ("/continue_generation",), self._continue),
            ("POST", ("/abort_request",), self._abort),
            ("POST", ("/update_weights_from_disk",), self._update_weights),
            ("POST", ("/update_weights_from_tensor",), self._weight_call(self._weights.from_tensor)),
            ("POST", ("/update_weights_from_distributed",), self._weight_call(self._weights.from_distributed)),
            ("POST", ("/init_weights_update_group",), self._weight_call(self._weights.init_group)),
            ("POST", ("/destroy_weights_update_group",), self._weight_call(self._weights.destroy_group)),
            ("POST", ("/update_weight_version",), self._update_version),
            ("*", ("/weights_checker",), self._check_weights),
            ("*", ("/release_memory_occupation",), self._release_memory),
            ("*", ("/resume_memory_occupation",), self._resume_memory),
        ):
            for path in paths:
                app.router.add_route(method, path, handler)
        return app

    # --- generation ------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        single, wanted = _split(body, self.engine)
        rids = [rid for _, _, rid in wanted]
        if len(set(rids)) < len(rids) or self._open.intersection(rids):
            raise ValueError(f"Duplicate request ID detected: {', '.join(r for r in rids if r in self._open) or rids}")
        stream = bool(body.get("stream"))
        if stream and not single:
            raise ValueError("stream takes one prompt, not a list.")
        return_logprob = bool(body.get("return_logprob"))
        self._open.update(rids)
        submitted: list[Request] = []
        try:
            changed = asyncio.Event()
            notify = self._notifier(changed)
            for input_ids, params, rid in wanted:
                submitted.append(self.engine.submit(input_ids, params, rid, notify, notify if stream else None))
            if stream:
                return await self._stream(http, submitted[0], changed, return_logprob)
            while any(request.finish_reason is None for request in submitted):
                changed.clear()
                if any(request.finish_reason is None for request in submitted):
                    await changed.wait()
            replies = [self._reply(request, return_logprob) for request in submitted]
            return web.json_response(replies[0] if single else replies)
        finally:
            self._open.difference_update(rids)
            for request in submitted:
                if request.finish_reason is None:  # the client went away
                    self._in_background(self.engine.abort, request.rid)

    def _notifier(self, changed: asyncio.Event) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def notify() -> None:
            # A closed loop means that the server is gone, and with it whoever waited.
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        return notify

    def _reply(self, request: Request, return_logprob: bool) -> dict[str, Any]:
        return request.reply(self.engine.version, self.engine.tokenizer, return_logprob)

    async def _stream(
        self, http: web.Request, request: Request, changed: asyncio.Event, return_logprob: bool
    ) -> web.StreamResponse:
        """Server-sent events; each carries everything so far, as SGLang's do by default."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        finished = False
        while not finished:
            await changed.wait()
            changed.clear()
            finished = request.finish_reason is not None
            await response.write(b"data: " + json.dumps(self._reply(request, return_logprob)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _in_background(self, call: Callable[..., Any], *args: Any) -> None:
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(call, *args))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- information -----------------------------------------------------------------------------------------------

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive else 503)

    async def _model_info(self, http: web.Request) -> web.Response:
        config = self.engine.decoder.config
        path = str(self.engine.model_dir or "")
        return web.json_response(
            {
                "model_path": path,
                "tokenizer_path": path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": str(self.engine.version),
                "model_type": config.model_type,
                "vocab_size": config.vocab_size,
            }
        )

    async def _server_info(self, http: web.Request) -> web.Response:
        path = str(self.engine.model_dir or "")
        return web.json_response(
            {
                "status": "ready",
                "engine": "rl360-embedded",
                "model_path": path,
                "tokenizer_path": path,
                "weight_version": str(self.engine.version),
                "context_length": self.engine.max_tokens,
                "max_running_requests": self.engine.max_running_requests,
                "enable_deterministic_inference": self.engine.deterministic,
                "dtype": str(self.engine.decoder.dtype).removeprefix("torch."),
                "device": self.engine.decoder.device.type,
                "memory_released": sorted(self.engine.released),
                "max_total_num_tokens": self.engine.state()["max_total_num_tokens"],
                "internal_states": [self.engine.state()],
            }
        )

    # --- control ---------------------------------------------------------------------------------------------------

    async def _flush_cache(self, http: web.Request) -> web.Response:
        deadline = time.monotonic() + float(http.query.get("timeout", 0.0))
        flushed = await asyncio.to_thread(self.engine.flush)
        while not flushed and time.monotonic() < deadline:
            await asyncio.sleep(FLUSH_POLL_S)
            flushed = await asyncio.to_thread(self.engine.flush)
        text = "Cache flushed." if flushed else "Flush cache failed."
        return web.Response(text=text + "\n", status=200 if flushed else 400)

    async def _pause(self, http: web.Request) -> web.Response:
        body = await _json(http)
        await asyncio.to_thread(self.engine.pause, body.get("mode") or "abort")
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await _json(http)
        self.engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        """A rid that nobody has, the empty one too, is no error: the request may have ended meanwhile."""
        body = await _json(http)
        await asyncio.to_thread(self.engine.abort, None if body.get("abort_all") else str(body.get("rid") or ""))
        return web.Response(status=200)

    async def _update_weights(self, http: web.Request) -> web.Response:
        body = await _json(http)
        folder, version = body.get("model_path"), body.get("weight_version")
        if not folder:
            raise ValueError("model_path is needed.")
        if body.get("abort_all_requests"):
            await asyncio.to_thread(self.engine.abort, None)
        try:
            number = None if version is None else int(version)
            await asyncio.to_thread(self.engine.load_weights, Path(folder), number)
        except (RL360Error, ValueError, OSError) as error:
            result = {"success": False, "message": str(error), "num_paused_requests": 0}
            return web.json_response(result, status=400)
        message = "Succeeded to update model weights."
        if number is not None:
            message += f" Weight version updated to {number}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    def _weight_call(self, call: Callable[[dict[str, Any]], str]) -> Handler:
        """A handler for one of the receiver's calls: SGLang answers 400 and `success: false` when it fails."""

        async def handle(http: web.Request) -> web.StreamResponse:
            body = await _json(http)
            try:
                message = await asyncio.to_thread(call, body)
            except (RL360Error, ValueError, KeyError, OSError, RuntimeError) as error:
                return web.json_response({"success": False, "message": f"{error!s}"}, status=400)
            if body.get("weight_version") is not None:
                await asyncio.to_thread(self.engine.set_version, int(body["weight_version"]))
            return web.json_response({"success": True, "message": message})

        return handle

    async def _update_version(self, http: web.Request) -> web.Response:
        body = await _json(http)
        if body.get("abort_all_requests", True):
            await asyncio.to_thread(self.engine.abort, None)
        await asyncio.to_thread(self.engine.set_version, int(body["new_version"]))
        message = f"Weight version updated to {body['new_version']}"
        return web.json_response({"success": True, "message": message, "new_version": str(body["new_version"])})

    async def _check_weights(self, http: web.Request) -> web.Response:
        body = await _json(http) if http.can_read_body else {}
        try:
            return web.json_response(await asyncio.to_thread(self._weights.checksums, body))
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)

    async def _release_memory(self, http: web.Request) -> web.Response:
        """A busy engine refuses, where SGLang's scheduler would die."""
        body = await _json(http) if http.can_read_body else {}
        await asyncio.to_thread(self.engine.release_memory, body.get("tags"))
        return web.json_response(None)

    async def _resume_memory(self, http: web.Request) -> web.Response:
        body = await _json(http) if http.can_read_body else {}
        self.engine.resume_memory(body.get("tags"))
        return web.json_response(None)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ValueError, TypeError) as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)


def _asks_for(api_key: str | None) -> Middleware:
    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and not request.path.startswith(("/health", "/metrics")):
            said = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(said, f"Bearer {api_key}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return authorize


async def _json(http: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await http.read() or b"null")
    except ValueError as error:
        raise ValueError(f"The body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("The body must be a JSON object (it may be empty: {}).")
    return body


Wanted = tuple[list[int], SamplingParams, str]


def _split(body: dict[str, Any], engine: EmbeddedEngine) -> tuple[bool, list[Wanted]]:
    """The one or many requests of a /generate body: (whether it was a single one, [(input_ids, params, rid)])."""
    for key, value in body.items():
        if key not in _UNDERSTOOD and key not in _IGNORED and value not in (None, False):
            raise ValueError(f"{key}={value!r} is not supported by the embedded engine.")
    if (body.get("text") is None) == (body.get("input_ids") is None):
        raise ValueError("Either text or input_ids should be provided.")
    prompts = body.get("input_ids")
    if prompts is None:
        if engine.tokenizer is None:
            raise ValueError("text needs a tokenizer, and this engine has none; send input_ids.")
        text = body["text"]
        single = isinstance(text, str)
        prompts = [engine.tokenizer.encode(t).ids for t in ([text] if single else text)]
    else:
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("input_ids must be a non-empty list of token ids, or a list of such lists.")
        single = not isinstance(prompts[0], list)
        prompts = [prompts] if single else prompts
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError("input_ids must be a non-empty list of token ids, or a list of such lists.")
    params = _one_each(body.get("sampling_params") or {}, dict, len(prompts), "sampling_params")
    rids = _one_each(body.get("rid"), (str, type(None)), len(prompts), "rid")
    if not single and isinstance(body.get("rid"), str):
        rids = [f"{body['rid']}_{index}" for index in range(len(prompts))]
    return single, [
        (prompt, SamplingParams.from_json(raw), rid or uuid.uuid4().hex)
        for prompt, raw, rid in zip(prompts, params, rids, strict=True)
    ]


def _one_each(value: Any, kind: type | tuple[type, ...], count: int, name: str) -> list[Any]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(isinstance(v, kind) for v in values):
        raise ValueError(f"{name} must be one value, or a list with one for each of the {count} prompts.")
    return values
