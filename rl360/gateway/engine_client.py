"""Any engine that speaks SGLang's HTTP protocol, embedded or real, behind `protocols.Engine`.

In: an URL and deadlines. Out: replies that were checked, or an `EngineError` with a cause: `engine_refused` (no
connection, or one that broke before an answer), `engine_timeout`, `engine_status_<code>`, `engine_reply` (an answer
that is not what the protocol says), `host_io` (this process can open no more connections). Retries, and which engine to
ask, are left to the caller.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import aiohttp

from rl360.errors import EngineError
from rl360.gateway.prompt_ids import PromptIds
from rl360.open_files import USED_UP

# Characters of an engine's error body that go into the message.
QUOTED_CHARS = 500
# A live engine answers /health at once; waiting longer only delays noticing a dead one.
HEALTH_TIMEOUT_S = 5.0
# Of a checkpoint's folder, whatever the server was started with: one that began with random weights (dummy) would
# otherwise refuse to read files.
FOLDER_FORMAT = "auto"


class HttpEngine:
    """One engine at `url`. Usable from several event loops; `close` closes the connections of the loop it runs in.

    `request_timeout_s` bounds one generation, `control_timeout_s` every other call but `load`, which reads a whole
    checkpoint and has `load_timeout_s`. `pause_mode` is SGLang's: abort ends running requests and hands back what they
    have, so that their callers resume from exact ids; retract and in_place let the engine go on with them.
    """

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float = 120.0,
        control_timeout_s: float = 30.0,
        load_timeout_s: float = 600.0,
        pause_mode: str = "abort",
        api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._load_timeout_s = load_timeout_s
        self._pause_mode = pause_mode
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def generate(
        self, input_ids: SequenceABC[int], sampling_params: Mapping[str, object], rid: str
    ) -> Mapping[str, Any]:
        """One completion, with logprobs. The reply's ids, logprobs and finish reason are checked against each other.

        When the deadline passes the engine is told to drop the request.
        """
        body = generate_body(input_ids, sampling_params, rid)
        try:
            reply = await self._json("POST", "/generate", body, self._request_timeout_s)
        except EngineError as error:
            if error.cause == "engine_timeout":
                await self._forget(rid)
            raise
        problem = reply_problem(reply)
        if problem is not None:
            raise EngineError("engine_reply", f"{self.url}/generate, rid {rid}: {problem}")
        return reply

    async def load(self, path: Path, version: int) -> None:
        body = {
            "model_path": str(path),
            "load_format": FOLDER_FORMAT,
            "weight_version": str(version),
            "flush_cache": True,
        }
        reply = await self._json("POST", "/update_weights_from_disk", body, self._load_timeout_s)
        if reply.get("success") is not True:
            raise EngineError("engine_reply", f"{self.url} did not load {path}: {reply.get('message', reply)}")

    async def flush(self, wait_s: float = 0.0) -> None:
        """Forget cached prefixes. An engine that still has requests in it after `wait_s` answers 400:
        `engine_status_400`. SGLang computes one step more for a request whose end was already told."""
        path = f"/flush_cache?timeout={wait_s:g}" if wait_s else "/flush_cache"
        await self._call("POST", path, {}, self._control_timeout_s + wait_s)

    async def abort(self, rid: str | None) -> None:
        body = {"abort_all": True, "rid": ""} if rid is None else {"rid": rid, "abort_all": False}
        await self._call("POST", "/abort_request", body, self._control_timeout_s)

    async def pause(self) -> None:
        await self._call("POST", "/pause_generation", {"mode": self._pause_mode}, self._control_timeout_s)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {}, self._control_timeout_s)

    async def health(self) -> bool:
        try:
            await self._call("GET", "/health", None, min(HEALTH_TIMEOUT_S, self._control_timeout_s))
        except EngineError:
            return False
        return True

    async def info(self) -> Mapping[str, Any]:
        """/model_info and /server_info as one mapping, /model_info winning: it has the version being served."""
        server = await self._either("/server_info", "/get_server_info")
        model = await self._either("/model_info", "/get_model_info")
        merged = {**server, **model}
        if "weight_version" not in merged:
            raise EngineError("engine_reply", f"{self.url}: neither /model_info nor /server_info has weight_version")
        return merged

    async def version(self) -> int:
        """The version that is served, by /model_info alone: it answers also while generation is paused."""
        reply = await self._either("/model_info", "/get_model_info")
        served = reply.get("weight_version")
        try:
            return int(str(served))
        except ValueError:
            raise EngineError("engine_reply", f"{self.url}: weight_version is {served!r}; expected a number") from None

    async def close(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _either(self, path: str, older_path: str) -> dict[str, Any]:
        try:
            return await self._json("GET", path, None, self._control_timeout_s)
        except EngineError as error:
            if error.cause != "engine_status_404":
                raise
            return await self._json("GET", older_path, None, self._control_timeout_s)

    async def _forget(self, rid: str) -> None:
        try:
            body = {"rid": rid, "abort_all": False}
            await self._call("POST", "/abort_request", body, min(HEALTH_TIMEOUT_S, self._control_timeout_s))
        except EngineError:
            pass  # it timed out already: that is what the caller is told

    async def _json(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        raw = await self._call(method, path, body, timeout_s)
        try:
            reply = json.loads(raw)
        except ValueError:
            raise EngineError("engine_reply", f"{self.url}{path} answered no JSON: {_quote(raw)}") from None
        if not isinstance(reply, dict):
            raise EngineError("engine_reply", f"{self.url}{path} answered no object: {_quote(raw)}")
        return reply

    async def _call(self, method: str, path: str, body: Any, timeout_s: float) -> bytes:
        status, raw, _ = await self.exchange(method, path, body, timeout_s)
        if status >= 400:
            raise EngineError(f"engine_status_{status}", f"{self.url}{path}: {_quote(raw)}")
        return raw

    async def exchange(
        self, method: str, path: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """One request, whatever its status: (status, body, headers). Raises EngineError where no whole answer came."""
        where = self.url + path
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**self._headers, **(headers or {})}
        if data is not None:
            sent["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session().request(method, where, data=data, headers=sent) as response:
                    return response.status, await response.read(), response.headers
        except TimeoutError:
            raise EngineError("engine_timeout", f"{where} did not answer in {timeout_s:g} s") from None
        except (aiohttp.ClientPayloadError, aiohttp.http_exceptions.HttpProcessingError) as error:
            raise EngineError("engine_reply", f"{where}: broken answer ({error!r})") from None
        except aiohttp.ClientResponseError as error:
            raise EngineError("engine_reply", f"{where}: not HTTP ({error!r})") from None
        except (aiohttp.ClientError, OSError) as error:
            ours = isinstance(error, OSError) and error.errno in USED_UP
            raise EngineError("host_io" if ours else "engine_refused", f"{where}: {error!r}") from None

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            # No limit on connections: as many requests are open as the rollout admits, and each has its deadline.
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
            self._sessions[loop] = session
        return session


def generate_body(input_ids: SequenceABC[int], sampling_params: Mapping[str, object], rid: str) -> bytes:
    """The body of one /generate: always with logprobs, never streamed."""
    rest = {"sampling_params": dict(sampling_params), "return_logprob": True, "rid": rid, "stream": False}
    ids = input_ids.json if isinstance(input_ids, PromptIds) else ",".join(map(str, map(int, input_ids))).encode()
    return b'{"input_ids":[' + ids + b"]," + json.dumps(rest).encode()[1:]


def reply_problem(reply: Mapping[str, Any]) -> str | None:
    """What makes a /generate reply unusable for training, or None: every field that is trained on must be there, be of
    the right kind and agree with the others."""
    ids, meta = reply.get("output_ids"), reply.get("meta_info")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        return f"output_ids is {_quote(ids)}, expected a list of token ids"
    if not isinstance(meta, dict):
        return f"meta_info is {_quote(meta)}, expected an object"
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length", "abort"):
        return f"meta_info.finish_reason is {_quote(reason)}, expected type stop, length or abort"
    if "weight_version" not in meta:
        return "meta_info.weight_version is missing"
    rows = meta.get("output_token_logprobs", [] if not ids else None)
    if not isinstance(rows, list) or len(rows) != len(ids):
        return f"meta_info.output_token_logprobs has {_quote(rows)}, expected one [logprob, id, text] for each id"
    for index, (row, token) in enumerate(zip(rows, ids, strict=True)):
        if not isinstance(row, list) or len(row) < 2 or row[1] != token:
            return f"meta_info.output_token_logprobs[{index}] is {_quote(row)}, expected the logprob of id {token}"
        if not isinstance(row[0], (int, float)) or not math.isfinite(row[0]) or row[0] > 1e-3:
            return f"meta_info.output_token_logprobs[{index}] is {_quote(row)}, expected a finite logprob"
    return None


def _quote(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= QUOTED_CHARS else text[:QUOTED_CHARS] + "..."
