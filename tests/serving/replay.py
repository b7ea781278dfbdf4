"""A stand-in that answers as a real SGLang was recorded to (benchmarks/h200/record_sglang.py).

In: a recording, calls. Out: the recorded status and reply of the call with the same path whose request is nearest; of
equals, the one of the same situation (paused in this mode, without its memory). The id of the request and the version
that was set last are put into replies, since clients check them. A pause holds generations back; one that was recorded
as running into it is answered when the pause (abort) or an abort ends it. Weights by handles or by a group are answered
as such calls were only where they could be real: handles that are pickles, a group that was made and not yet ended. No
tensor is opened or received, so a group's other rank must not wait. After a call that nobody answered, nobody does.
What was not recorded is a 501 that says so, so that nothing is made up.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.h200.record_sglang import GROUP, HANDLES

RECORDINGS = Path(__file__).parent / "recordings"
NOT_COMPARED = ("rid", "input_ids")
IDLE, MEMORY = "idle", "memory changes hands"
PICKLE = b"\x80"  # how every pickle since protocol 2 begins


class Replay:
    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())
        self.calls: list[tuple[str, Any]] = []
        self.situation = IDLE
        self.gone = False
        self.version: str | None = None  # None: none was set, so the recorded one
        self._running = asyncio.Event()
        self._running.set()
        self.ends_later = asyncio.Event()  # a generation runs until something ends it
        self._ended = asyncio.Condition()
        self._open: set[str] = set()  # their ids
        self._groups: set[str] = set()  # names of those that were made and not ended

    def nearest(self, call: str, body: Any) -> dict[str, Any] | None:
        """The row whose request shares most with this one; of equals the first one of this situation."""
        rows = [row for row in self.rows if row["call"] == call]
        possible = self._possible(call, body)
        if possible is not None:
            rows = [row for row in rows if (row["status"] == 200) == possible]
        return max(
            rows,
            key=lambda row: (_likeness(row["request"], body), row["situation"] == self.situation),
            default=None,
        )

    def _possible(self, call: str, body: Any) -> bool | None:
        """Whether a server could do what is asked, where that hangs on what the caller has made; None: it does not."""
        match call.removeprefix("POST "):
            case "/update_weights_from_tensor":
                return all(base64.b64decode(handle).startswith(PICKLE) for handle in body["serialized_named_tensors"])
            case "/init_weights_update_group":
                return "group_name" in body
            case "/update_weights_from_distributed" | "/destroy_weights_update_group":
                return body["group_name"] in self._groups
        return None

    async def answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        call = f"{request.method} {request.path_qs}"
        self.calls.append((call, body))
        if request.path == "/generate":
            await self._running.wait()
            row = self._generation(body)
        else:
            row = self.nearest(call, body) or self.nearest(f"{request.method} {request.path}", body)
        if row is None:
            return web.json_response({"error": {"message": f"{call} is not in the recording"}}, status=501)
        self.gone |= row["status"] == 0
        if self.gone:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if request.path == "/generate" and _is_long(row):
            row = await self._until_ended(body, row)
        elif row["status"] == 200:
            await self._change(request.path, body)
        reply = copy.deepcopy(row["reply"])
        if isinstance(reply, dict):
            stamped = reply.get("meta_info", reply)
            if "id" in stamped and isinstance(body, dict):
                stamped["id"] = body.get("rid")
            if "weight_version" in stamped and self.version is not None:
                stamped["weight_version"] = self.version
        if isinstance(reply, str):
            return web.Response(text=reply, status=row["status"])
        return web.json_response(reply, status=row["status"])

    def _generation(self, body: Any) -> dict[str, Any] | None:
        """Of all situations but a pause's own: whoever waits for its end is answered as anybody."""
        rows = [row for row in self.rows if row["call"] == "POST /generate" and "sent into" not in row["situation"]]
        return max(rows, key=lambda row: _likeness(row["request"], body), default=None)

    async def _until_ended(self, body: Any, row: dict[str, Any]) -> dict[str, Any]:
        rid = str(body.get("rid"))
        self._open.add(rid)
        self.ends_later.set()
        async with self._ended:
            await self._ended.wait_for(lambda: rid not in self._open)
        return row

    async def _change(self, path: str, body: Any) -> None:
        if path == "/pause_generation":
            self._running.clear()
            self.situation = f"paused, {body['mode']}"
        elif path == "/continue_generation":
            self._running.set()
            self.situation = IDLE
        elif path == "/release_memory_occupation":
            self.situation = MEMORY
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/update_weights_from_tensor":
            self.situation = HANDLES
        elif path == "/update_weights_from_distributed":
            self.situation = GROUP
        elif path == "/init_weights_update_group":
            self._groups.add(body["group_name"])
        elif path == "/destroy_weights_update_group":
            self._groups.remove(body["group_name"])
        if path == "/abort_request" or (path == "/pause_generation" and body["mode"] == "abort"):
            ends_all = path == "/pause_generation" or body.get("abort_all")
            async with self._ended:
                self._open -= set(self._open) if ends_all else {body.get("rid")}
                self._ended.notify_all()


def _is_long(row: Mapping[str, Any]) -> bool:
    return bool(row["status"] == 200 and row["reply"]["meta_info"]["finish_reason"]["type"] == "abort")


def _likeness(recorded: Any, asked: Any) -> int:
    """Equal fields count for, different ones against."""
    if not isinstance(recorded, Mapping) or not isinstance(asked, Mapping):
        return int(recorded == asked)
    keys = {*recorded, *asked} - set(NOT_COMPARED)
    score = 0
    for key in keys:
        mine, other = recorded.get(key), asked.get(key)
        if isinstance(mine, Mapping) or isinstance(other, Mapping):
            score += _likeness(mine or {}, other or {})
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
