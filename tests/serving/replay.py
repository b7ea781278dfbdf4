"""A stand-in that answers as a real SGLang was recorded to (benchmarks/h200/record_sglang.py).

In: a recording, calls. Out: the recorded status and reply of the call with the same path whose request is nearest; the
id of the request is put into a generation's reply, since clients check it. What was not recorded is a 501 that says so,
so that nothing is made up. `paused` holds generations back, as the real one does.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDINGS = Path(__file__).parent / "recordings"
NOT_COMPARED = ("rid", "input_ids")


class Replay:
    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())
        self.calls: list[tuple[str, Any]] = []
        self._running = asyncio.Event()
        self._running.set()

    def has(self, call: str) -> bool:
        return any(row["call"] == call for row in self.rows)

    def nearest(self, call: str, body: Any) -> dict[str, Any] | None:
        """The row whose request shares most with this one; the first of equals."""
        rows = [row for row in self.rows if row["call"] == call and row["status"]]
        return max(rows, key=lambda row: _likeness(row["request"], body), default=None)

    async def answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        call = f"{request.method} {request.path}"
        self.calls.append((call, body))
        row = self.nearest(call, body)
        if row is None:
            return web.json_response({"error": {"message": f"{call} is not in the recording"}}, status=501)
        if row["status"] == 200:
            if request.path == "/pause_generation":
                self._running.clear()
            elif request.path == "/continue_generation":
                self._running.set()
        if request.path == "/generate":
            await self._running.wait()
        reply = copy.deepcopy(row["reply"])
        if isinstance(reply, dict) and "meta_info" in reply and isinstance(body, dict):
            reply["meta_info"]["id"] = body.get("rid")
        if isinstance(reply, str):
            return web.Response(text=reply, status=row["status"])
        return web.json_response(reply, status=row["status"])


def _likeness(recorded: Any, asked: Any) -> int:
    """Equal fields count for, different ones against."""
    if not isinstance(recorded, Mapping) or not isinstance(asked, Mapping):
        return int(recorded == asked)
    keys = {*recorded, *asked} - set(NOT_COMPARED)
    score = 0
    for key in keys:
        mine, other = recorded.get(key), asked.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            score += _likeness(mine, other)
        else:
            score += 1 if mine == other else -1
    return score


@asynccontextmanager
async def serve(path: Path) -> AsyncIterator[tuple[str, Replay]]:
    replay = Replay(path)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{anything:.*}", replay.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", replay
    finally:
        await runner.cleanup()
