"""An engine without a model: SGLang's /generate, deterministic in (input_ids, sampling_seed), with faults on demand.

`StubModel` decides replies and remembers what it sampled; `StubEngine` is a protocols.Engine around it in this process,
`serve` the same behind HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from rl360.errors import EngineError
from rl360.gateway.engine_client import reply_problem
from rl360.gateway.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Fault:
    """What goes wrong with the next request: status | refused | hang | abort | drop."""

    kind: str
    status: int = 500
    keep: int = 0  # abort: tokens sampled before it
    field: str = ""  # drop: the field left out of the reply, "meta_info.x" or "x"


@dataclass(frozen=True)
class Sample:
    """One reply: what the prompt was and what was sampled for it."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: str
    params: Mapping[str, Any]


class StubModel:
    """Samples random ids, or the texts in `script` first.

    Args:
        tokenizer: encodes scripted texts; its first eos id ends them.
        eos: id that ends a turn.
        delay_s: how long a request waits before its first token.
        token_s: how long each token takes.
    """

    def __init__(self, tokenizer: TextTokenizer, eos: int, delay_s: float = 0.0, token_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.eos = eos
        self.delay_s = delay_s
        self.token_s = token_s
        self.version = 0
        self.script: deque[str] = deque()
        self.faults: deque[Fault] = deque()
        self.samples: list[Sample] = []
        self.num_requests = 0
        self.aborted: list[str] = []
        self.plain_ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.added]

    def sample(self, payload: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """(HTTP status, reply)."""
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "status":
            return fault.status, {"error": {"message": "injected"}}
        prompt, params = tuple(payload["input_ids"]), payload["sampling_params"]
        seed = hashlib.sha256(array("q", [*prompt, params["sampling_seed"]]).tobytes()).digest()
        rng = random.Random(seed)
        limit = params["max_new_tokens"]
        if self.script:
            ids = [*self.tokenizer.encode(self.script.popleft()), self.eos]
        else:
            ids = [rng.choice(self.plain_ids) for _ in range(rng.randint(1, 24))]
            ids.append(self.eos)
        finish: dict[str, Any] = {"type": "stop", "matched": self.eos}
        if len(ids) > limit:
            ids, finish = ids[:limit], {"type": "length", "length": limit}
        if fault is not None and fault.kind == "abort":
            ids, finish = ids[: fault.keep], {"type": "abort", "message": "injected"}
        logprobs = [-rng.random() for _ in ids]
        self.samples.append(Sample(prompt, tuple(ids), tuple(logprobs), self.version, finish["type"], dict(params)))
        reply = {
            "text": self.tokenizer.decode(ids),
            "output_ids": ids,
            "meta_info": {
                "id": payload["rid"],
                "finish_reason": finish,
                "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "cached_tokens": 3,
                "weight_version": str(self.version),
                "something_new": "kept",
            },
        }
        if fault is not None and fault.kind == "abort":
            self.version += 1
        if fault is not None and fault.kind == "drop":
            where, _, name = fault.field.rpartition(".")
            (reply[where] if where else reply).pop(name)  # type: ignore[attr-defined]
        return 200, reply

    def next_fault(self, kind: str) -> bool:
        """Take the next fault when it is of this kind."""
        if self.faults and self.faults[0].kind == kind:
            self.faults.popleft()
            return True
        return False


class StubEngine:
    """A protocols.Engine in this process."""

    def __init__(self, model: StubModel, url: str = "stub://0") -> None:
        self.model = model
        self.url = url
        self.gate: asyncio.Event | None = None  # set it to hold every reply until it opens

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, object], rid: str
    ) -> Mapping[str, Any]:
        self.model.num_requests += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.model.delay_s:
            await asyncio.sleep(self.model.delay_s)
        if self.model.next_fault("refused"):
            raise EngineError("engine_refused", f"{self.url}: connection refused")
        if self.model.next_fault("hang"):
            await asyncio.sleep(3600)
        status, reply = self.model.sample({"input_ids": input_ids, "sampling_params": sampling_params, "rid": rid})
        await asyncio.sleep(self.model.token_s * len(reply.get("output_ids", ())))
        if status != 200:
            raise EngineError(f"engine_status_{status}", f"{self.url}: {reply}")
        if problem := reply_problem(reply):
            raise EngineError("engine_reply", f"{self.url}: {problem}")
        return reply

    async def abort(self, rid: str | None) -> None:
        self.model.aborted.append(rid or "all")

    async def load(self, path: Path, version: int) -> None:
        self.model.version = version

    async def flush(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def health(self) -> bool:
        return True

    async def info(self) -> Mapping[str, Any]:
        return {"weight_version": str(self.model.version)}

    async def close(self) -> None: ...


@asynccontextmanager
async def serve(model: StubModel, port: int = 0, api_key: str | None = None) -> AsyncIterator[str]:
    """The stub behind HTTP; yields its URL. "refused" cuts the connection before an answer. Port 0: a free one.

    api_key: asked for everywhere but at /health, as SGLang does.
    """

    async def generate(request: web.Request) -> web.Response:
        payload = await request.json()
        model.num_requests += 1
        if model.delay_s:
            await asyncio.sleep(model.delay_s)
        if model.next_fault("refused"):
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if model.next_fault("hang"):
            await asyncio.sleep(3600)
        status, reply = model.sample(payload)
        await asyncio.sleep(model.token_s * len(reply.get("output_ids", ())))
        return web.json_response(reply, status=status)

    async def abort(request: web.Request) -> web.Response:
        model.aborted.append((await request.json()).get("rid", "all"))
        return web.json_response({})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "stub", "is_generation": True, "weight_version": str(model.version)})

    @web.middleware
    async def locked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    app = web.Application(client_max_size=2**28, middlewares=[locked])
    app.router.add_get("/model_info", info)
    app.router.add_get("/server_info", info)
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
