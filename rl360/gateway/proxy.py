"""The session proxy: one process, one aiohttp app, many sessions, each an OpenAI base URL of its own.

In: `open`, `close_session`, `discard` from the driver; chat completions from agents. Out: `Session` records. Left to
others: what a session does with a request (session.py), how this process is started (a WorkerGroup).

    POST /s/<try_id>/v1/chat/completions      GET /s/<try_id>/v1/models      GET /health
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from rl360.errors import ConfigError, InfrastructureError
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.engine_pool import EnginePool
from rl360.gateway.generation import LONGEST_BY_EXPRESSION
from rl360.gateway.openai_api import RequestError, stream_events
from rl360.gateway.parsers import make_parser
from rl360.gateway.replies import Services
from rl360.gateway.routes import LeastLoaded, Route
from rl360.gateway.session import ProxySession
from rl360.gateway.session_log import SessionLog
from rl360.gateway.smg_route import SmgRoute
from rl360.gateway.templates import ChatTemplate
from rl360.gateway.tokenizer import TextTokenizer
from rl360.gateway.verify import make_question, verify_hops
from rl360.open_files import allow_many
from rl360.types import AttemptSpec, Session

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 256 * 2**20  # histories of tool output are long; the default of 1 MiB is not for agents
NUM_THREADS = 4  # templates hold the interpreter, tokenization does not: a few threads keep both busy
# Histories of hundreds of sessions are hundreds of thousands of objects, and a look through all of them stops every
# session for half a second. Cycles are few here (a failed call's traceback): the youngest objects are looked at a
# seventh as often as Python would by itself, and all of memory after 500 looks at the middle ones instead of 10.
GC_THRESHOLDS = (5_000, 10, 500)
BACKLOG = 1024  # agents connect in bursts, a whole batch at once


class ProxyWorker:
    """Runs in a process of its own; imports no torch.

    Args:
        rank: of the worker group; there is one proxy.
        engine_urls: the serving set.
        tokenizer_dir: the model's checkpoint folder.
        host, port: where to listen; port 0 takes a free one.
        tool_parser, reasoning_parser: the model family's, by name.
        request_timeout_s: of one model call, resumptions included.
        split_above: see EnginePool.
        log_dir: sessions.jsonl goes there.
        api_key_env: name of the variable that holds the engines' key; None: no key.
        smg_url: SMG, which stands between this proxy and the engines; None: the proxy chooses the engine itself.
        smg_key: SMG's own key where the engines have none.
    """

    def __init__(
        self,
        rank: int,
        engine_urls: Sequence[str],
        tokenizer_dir: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        tool_parser: str = "none",
        reasoning_parser: str = "none",
        request_timeout_s: float = 120.0,
        split_above: int | None = LONGEST_BY_EXPRESSION,
        log_dir: str | Path = ".",
        api_key_env: str | None = None,
        smg_url: str | None = None,
        smg_key: str | None = None,
    ) -> None:
        if not engine_urls:
            raise ConfigError("rollout.engine_urls: empty; expected the URL of at least one engine")
        if api_key_env and api_key_env not in os.environ:
            raise ConfigError(f"gateway.api_key_env: {api_key_env} is not set in the environment")
        self._parser = make_parser(tool_parser, reasoning_parser)
        self._engine_urls = list(engine_urls)
        self._tokenizer_dir = Path(tokenizer_dir)
        self._host = host
        self._port = port
        self._timeout_s = request_timeout_s
        self._split_above = split_above
        self._log_dir = Path(log_dir)
        self._api_key = os.environ[api_key_env] if api_key_env else None
        self._smg_url = smg_url
        self._smg_key = self._api_key or smg_key
        self._sessions: dict[str, ProxySession] = {}

    async def start(self) -> None:
        """Load the tokenizer and listen. Raises ConfigError (folder) or OSError (port taken)."""
        gc.set_threshold(*GC_THRESHOLDS)  # the process is the proxy's alone
        allow_many()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="proxy")
        loop = asyncio.get_running_loop()
        tokenizer = await loop.run_in_executor(self._executor, TextTokenizer.from_folder, self._tokenizer_dir)
        template = await loop.run_in_executor(self._executor, ChatTemplate, tokenizer)
        self._engines = [self._client(url) for url in self._engine_urls]
        self._smg: HttpEngine | None = None
        route: Route
        if self._smg_url is None:
            route = LeastLoaded(self._engines)
        else:
            self._smg = HttpEngine(self._smg_url, request_timeout_s=self._timeout_s, api_key=self._smg_key)
            route = SmgRoute(self._smg, self._engines, self._timeout_s)
        pool = EnginePool(route, self._timeout_s, tokenizer.decode, tokenizer.eos_ids, self._split_above)
        self._services = Services(tokenizer, template, self._parser, pool, self._executor)
        self._log = SessionLog(self._log_dir / "sessions.jsonl")
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/s/{try_id}/v1/models", self._models)
        app.router.add_post("/s/{try_id}/v1/chat/completions", self._chat)
        # handler_cancellation: a client that hangs up must not keep its handler waiting for the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG)
        await site.start()
        self._port = self._runner.addresses[0][1]
        log.info("proxy listens on %s for %d engine(s)", self.url(), len(self._engines))

    def _client(self, url: str) -> HttpEngine:
        return HttpEngine(url, request_timeout_s=self._timeout_s, api_key=self._api_key)

    async def set_engines(self, urls: Sequence[str]) -> None:
        """The serving set from now on. What runs on an engine that left is cut off and asked of another."""
        left = [engine for engine in self._engines if engine.url not in urls]
        stayed = {engine.url: engine for engine in self._engines if engine.url in urls}
        self._engines = [stayed.get(url) or self._client(url) for url in dict.fromkeys(urls)]
        self._services.pool.set_engines(self._engines)
        log.info("the serving set is %s", ", ".join(urls) or "empty")
        await asyncio.gather(*(engine.close() for engine in left), return_exceptions=True)

    def hold(self) -> None:
        """No request reaches an engine until `release`; sessions wait, and their clocks stand still."""
        self._services.pool.hold()

    def release(self) -> None:
        self._services.pool.release()

    async def idle(self, timeout_s: float) -> int:
        """Wait until no request is on an engine; returns how many still are after `timeout_s`."""
        return await self._services.pool.idle(timeout_s)

    def counts(self) -> Mapping[str, int]:
        """What failed under the sessions since the start: see Route.counts."""
        return self._services.pool.route.counts()

    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def open(self, spec: AttemptSpec) -> str:
        """Open a try's session; returns its OpenAI base URL."""
        if spec.try_id in self._sessions:
            raise ValueError(f"session {spec.try_id} is already open")
        self._sessions[spec.try_id] = ProxySession(spec, self._services)
        return f"{self.url()}/s/{quote(spec.try_id, safe='')}/v1"

    async def close_session(self, try_id: str) -> Session:
        """End a session, log it and hand over its record. Raises InfrastructureError `proxy_session_lost`."""
        if try_id not in self._sessions:
            raise InfrastructureError("proxy_session_lost", f"no open session {try_id!r}: did the proxy start again?")
        return await self._end(try_id, discarded=False)

    async def discard(self, try_id: str) -> None:
        """End a session whose tokens nobody wants; one that is not open is none to end."""
        if try_id in self._sessions:
            await self._end(try_id, discarded=True)

    def health(self) -> bool:
        return True

    async def verify(self) -> list[str]:
        """Ask each engine for a few tokens, SMG too, and check every field that training needs.

        Returns the engines' URLs. Raises EngineError naming every missing field and the hop that lost it.
        """
        ids = await self._offload_encode("The first request of this run. ")
        await verify_hops(self._engines, self._smg, make_question(ids or [0], "verify"), self._timeout_s)
        return [engine.url for engine in self._engines]

    async def close(self) -> None:
        """End what is open and stop listening."""
        for try_id in list(self._sessions):
            await self.discard(try_id)
        await self._runner.cleanup()
        await self._services.pool.close()
        await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._log.close()

    async def _end(self, try_id: str, discarded: bool) -> Session:
        session = self._sessions.pop(try_id)
        record = await session.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._log.write, session.spec, record, discarded)
        return record

    async def _offload_encode(self, text: str) -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._services.tokenizer.encode, text)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions), **self.counts()})

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["try_id"] not in self._sessions:
            return _error(_not_found(request.match_info["try_id"]))
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "rl360"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try_id = request.match_info["try_id"]
        session = self._sessions.get(try_id)
        if session is None:
            return _error(_not_found(try_id))
        try:
            with session.waiting():
                chat, options = await session.read(await request.read())
            call = session.call(chat)
            with call.attended(), session.waiting():
                payload = await session.answer(call, options)
                if options.stream:
                    response = web.StreamResponse(
                        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                    )
                    await response.prepare(request)
                    for event in stream_events(payload, options.include_usage):
                        await response.write(event)
                else:
                    body = json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace")
                    response = web.Response(body=body, content_type="application/json")
                    await response.prepare(request)
                await response.write_eof()
                # A client that is gone by now has not read it; one that reads and dies is the agent's own affair.
                call.delivered = call.delivered or (
                    request.transport is not None and not request.transport.is_closing()
                )
                return response
        except RequestError as error:
            return _error(error)


def _not_found(try_id: str) -> RequestError:
    return RequestError(404, f"no open session {try_id!r}", code="session_not_found")


def _error(error: RequestError) -> web.Response:
    return web.json_response(error.payload(), status=error.status)
