"""The way to the engines through SMG: a routing key for each session, and SMG keeps it with one engine.

In: a session's requests. Out: as in routes.py. Left to others: SMG's process and its set of engines (smg_worker.py).

SMG retries nothing. What fails under us (SMG restarts, an engine dies) is sent again here, so that it is counted; by
then SMG has its engines back, or has lost the dead one and gives the session another. Aborts go to the engines
directly: SMG has no such call.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.engine_client import HttpEngine, generate_body, reply_problem
from rl360.gateway.gate import Gate
from rl360.gateway.generation import read_reply
from rl360.gateway.prompt_ids import PromptIds
from rl360.gateway.routes import Routed, abort_quietly, refuses_request, resend_rid
from rl360.protocols import Engine

log = logging.getLogger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"
ROUTED_TO = "x-smg-routed-worker-id"  # the engine's URL, on every answer that an engine gave
OWN_ERROR = "x-smg-error-code"  # on every answer that is SMG's own
# What SMG says when it has no answer of an engine: nobody listens, the connection broke, all leave, it has none (yet).
ENGINE_GONE = (
    "call_upstream_connection_failed",
    "call_upstream_request_error",
    "no_available_workers",
    "model_not_found",
)
BUSY = ("engine_status_429", "engine_status_503")
QUOTED_CHARS = 300
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
GONE_FOR_S = 20.0  # how long SMG or an engine may be away before the turn fails: several restarts of SMG
MOST_BUSY_RESENDS = 3


class SmgRoute:
    """Implements Route.

    Args:
        smg: a client of SMG's address; its key is forwarded to the engines.
        engines: the serving set, for aborts.
        timeout_s: of one request.
        gone_for_s: how long SMG, or a session's engine, may be away before EngineError `smg_refused` or
            `engine_refused`.
    """

    def __init__(
        self, smg: HttpEngine, engines: Sequence[Engine], timeout_s: float, gone_for_s: float = GONE_FOR_S
    ) -> None:
        self.gate = Gate()
        self._smg = smg
        self._engines = {engine.url: engine for engine in engines}
        self._nobody = False  # serves: the set has become empty
        self._changed = asyncio.Event()  # the serving set
        self._timeout_s = timeout_s
        self._gone_for_s = gone_for_s
        self._last_engine: dict[str, str] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._resends = self._moves = 0

    async def ask(self, session: str, rid: str, ids: PromptIds, params: Mapping[str, Any]) -> Routed:
        """One request. What fails under us is sent again with growing pauses, and counted."""
        loop = asyncio.get_running_loop()
        gone_since: float | None = None
        pause_s, resends, busy = FIRST_PAUSE_S, 0, 0
        while True:
            await self.gate.until_open()
            while self._nobody:
                await self._changed.wait()
                await self.gate.until_open()
                gone_since = None
            try:
                with self.gate.passing():
                    reply, engine_url = await self._once(session, resend_rid(rid, resends), ids, params)
                return Routed(read_reply(reply, f"{engine_url} (through smg)"), engine_url, resends)
            except EngineError as error:
                if error.cause == "engine_timeout" or refuses_request(error.cause):
                    raise
                if error.cause in ("smg_refused", "engine_refused", "host_io"):
                    gone_since = loop.time() if gone_since is None else gone_since
                    if loop.time() - gone_since >= self._gone_for_s:
                        raise
                elif error.cause in BUSY and busy < MOST_BUSY_RESENDS:
                    busy += 1
                else:
                    raise
                log.warning("%s: sent again in %.1f s: %s", rid, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            resends += 1
            self._resends += 1

    def where(self, session: str) -> str:
        return f"{self._last_engine.get(session, 'an engine')} through smg at {self._smg.url}"

    def forget(self, session: str) -> None:
        self._last_engine.pop(session, None)

    def set_engines(self, engines: Sequence[Engine]) -> None:
        self._engines = {engine.url: engine for engine in engines}
        self._nobody = not self._engines
        self._changed.set()
        self._changed = asyncio.Event()

    def counts(self) -> Mapping[str, int]:
        return {"engine_resends": self._resends, "engine_moves": self._moves}

    async def close(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._smg.close()

    async def _once(
        self, session: str, rid: str, ids: PromptIds, params: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        try:
            status, raw, headers = await self._smg.exchange(
                "POST", "/generate", generate_body(ids, params, rid), self._timeout_s, routing_key(session)
            )
        except EngineError as error:
            if error.cause == "engine_timeout":
                self._abort(session, rid)
            cause = "smg_refused" if error.cause == "engine_refused" else error.cause
            raise EngineError(cause, f"smg: {error}") from None
        except asyncio.CancelledError:
            self._abort(session, rid)
            raise
        engine_url = headers.get(ROUTED_TO, "")
        if status >= 400:
            raise _failure(status, raw, headers, self._smg.url)
        self._remember(session, engine_url)
        return checked_reply(raw, f"{engine_url or 'an engine'} through smg at {self._smg.url}, rid {rid}"), engine_url

    def _remember(self, session: str, engine_url: str) -> None:
        last = self._last_engine.get(session)
        if last is not None and last != engine_url:
            self._moves += 1
        self._last_engine[session] = engine_url

    def _abort(self, session: str, rid: str) -> None:
        """Tell the session's engine, or all of them where it is not known yet."""
        known = self._engines.get(self._last_engine.get(session, ""))
        for engine in [known] if known is not None else list(self._engines.values()):
            task = asyncio.get_running_loop().create_task(abort_quietly(engine, rid))
            self._background.add(task)
            task.add_done_callback(self._background.discard)


def routing_key(session: str) -> dict[str, str]:
    """The header that keeps a session with its engine. Hashed: try ids may hold what no header can."""
    return {ROUTING_KEY: hashlib.sha256(session.encode()).hexdigest()[:32]}


def checked_reply(raw: bytes, where: str) -> Mapping[str, Any]:
    """A /generate reply as JSON. Raises EngineError `engine_reply` for one that training cannot use."""
    try:
        reply = json.loads(raw)
    except ValueError:
        raise EngineError("engine_reply", f"{where}: no JSON: {raw[:QUOTED_CHARS]!r}") from None
    problem = reply_problem(reply) if isinstance(reply, dict) else f"no object: {raw[:QUOTED_CHARS]!r}"
    if problem is not None:
        raise EngineError("engine_reply", f"{where}: {problem}")
    return reply


def _failure(status: int, raw: bytes, headers: Mapping[str, str], smg_url: str) -> EngineError:
    text = raw[:QUOTED_CHARS].decode(errors="replace")
    if code := headers.get(OWN_ERROR):
        cause = "engine_refused" if code in ENGINE_GONE else f"engine_status_{status}"
        return EngineError(cause, f"smg at {smg_url} says {code}: {text}")
    engine_url = headers.get(ROUTED_TO)
    who = f"{engine_url} (through smg)" if engine_url else f"smg at {smg_url}"
    return EngineError(f"engine_status_{status}", f"{who}: {text}")
