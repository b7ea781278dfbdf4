"""Both gateways in front of stub engines, as a driver starts them, and agents that talk through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rl360.engine.workers import LocalWorkerGroup
from rl360.gateway.direct import DirectGateway
from rl360.gateway.smg import SmgGateway
from rl360.types import AttemptSpec
from tests.gateway.kit import attempt_spec, tokenizer_of, write_folder
from tests.gateway.stub_engine import StubModel, serve

KINDS = ("direct", "smg")
FAST = {"stop_timeout_s": 0.5, "health_interval_s": 0.2}  # of SMG, which otherwise takes 5 s to end


class Server:
    """A stub engine that can go away and come back at the same address."""

    def __init__(self, api_key: str | None = None) -> None:
        self.model = StubModel(tokenizer_of(), 3)
        self.url = ""
        self._api_key = api_key
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        port = int(self.url.rpartition(":")[2] or 0)
        self.url = await self._stack.enter_async_context(serve(self.model, port, self._api_key))

    async def stop(self) -> None:
        await self._stack.aclose()


@dataclass
class Rig:
    """A started gateway with its engines, and an agent for each session."""

    gateway: Any
    servers: list[Server]
    log_dir: Path
    client: aiohttp.ClientSession
    urls: dict[str, str] = field(default_factory=dict)
    messages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def open(self, *names: str, **sampling: Any) -> list[AttemptSpec]:
        specs = [attempt_spec(name, **sampling) for name in names]
        for spec in specs:
            self.urls[spec.attempt_id] = await self.gateway.open(spec)
            self.messages[spec.attempt_id] = []
        return specs

    async def ask(self, name: str) -> tuple[int, Mapping[str, Any]]:
        """One more turn of a session: (status, payload)."""
        messages = [*self.messages[name], {"role": "user", "content": f"{name} {len(self.messages[name])}"}]
        async with self.client.post(f"{self.urls[name]}/chat/completions", json={"messages": messages}) as response:
            payload = await response.json()
        if response.status == 200:
            self.messages[name] = [*messages, payload["choices"][0]["message"]]
        return response.status, payload

    async def say(self, name: str) -> None:
        status, payload = await self.ask(name)
        assert status == 200, payload

    def asked(self) -> list[int]:
        """Requests that each engine got."""
        return [server.model.num_requests for server in self.servers]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.log_dir.iterdir())


@asynccontextmanager
async def rig(
    kind: str, tmp_path: Path, num_engines: int = 2, api_key: str | None = None, start: bool = True, **kwargs: Any
) -> AsyncIterator[Rig]:
    servers = [Server(api_key) for _ in range(num_engines)]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        made = make(kind, tmp_path, [server.url for server in servers], **kwargs)
        stack.push_async_callback(made.close)
        if start:
            await made.start()
        yield Rig(made, servers, tmp_path / "logs", client)


def make(kind: str, tmp_path: Path, urls: Sequence[str], **kwargs: Any) -> Any:
    """A gateway of either kind, not started."""

    def make_workers(target: str, size: int, kwargs: Any, name: str) -> LocalWorkerGroup:
        return LocalWorkerGroup(target, size, kwargs, name=name, log_dir=tmp_path / "logs")

    common = {
        "engine_urls": list(urls),
        "tokenizer_dir": write_folder(tmp_path / "model"),
        "worker_group_factory": make_workers,
        "log_dir": tmp_path / "logs",
        "request_timeout_s": 30,
    }
    if kind == "direct":
        return DirectGateway(**{**common, **kwargs})
    return SmgGateway(**{**common, **FAST, **kwargs})
