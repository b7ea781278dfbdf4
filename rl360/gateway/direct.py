"""The gateway of a run on one machine: one proxy process straight in front of the engines.

In: attempt specs. Out: base URLs for agents, `Session` records. Left to others: the proxy itself (proxy.py), processes
(the WorkerGroup that is passed in).

A proxy that dies is started again within a second, one that hangs when a call to it has timed out. Its sessions are
lost with it: their agents find nobody at the old URL, and closing them raises `proxy_session_lost`, so that their tries
are made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rl360.errors import EngineError, InfrastructureError, RL360Error, WorkerDied
from rl360.gateway.generation import LONGEST_BY_EXPRESSION
from rl360.protocols import WorkerGroup
from rl360.types import AttemptSpec, Purpose, Sampling, Session, Stop, Task

log = logging.getLogger(__name__)

PROXY = "rl360.gateway.proxy:ProxyWorker"
CALL_TIMEOUT_S = 60.0  # opening or closing a session: milliseconds, unless the machine is drowning or the proxy hangs
HEALTH_TIMEOUT_S = 5.0
VERIFY_NEW_TOKENS = 8
WATCH_S = 0.5  # between two looks whether the proxy's process is there
GAUGE = "_now"  # names of counts that end so say what is, not what has happened
FAILED_WATCH_S = 10.0  # the same, once it could not be started again


class DirectGateway:
    """Implements protocols.Gateway.

    Args:
        host, port, api_key_env: of GatewayConfig.
        engine_urls, tokenizer_dir, tool_parser, reasoning_parser, request_timeout_s, split_above,
            log_dir: see ProxyWorker.
        worker_group_factory: (target, size, kwargs, name) -> WorkerGroup.
        smg_url, smg_key: of SmgGateway.
        call_timeout_s: of opening or closing a session; a proxy that takes longer and answers no /health is replaced.

    Every method but `start` and `verify` raises InfrastructureError: `proxy_session_lost`, `proxy_timeout`,
    `proxy_error`, and `proxy_start` when the proxy cannot be started again.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key_env: str | None = None,
        *,
        engine_urls: Sequence[str],
        tokenizer_dir: str | Path,
        worker_group_factory: Callable[..., WorkerGroup],
        log_dir: str | Path,
        tool_parser: str = "none",
        reasoning_parser: str = "none",
        request_timeout_s: float = 120.0,
        split_above: int | None = LONGEST_BY_EXPRESSION,
        call_timeout_s: float = CALL_TIMEOUT_S,
        smg_url: str | None = None,
        smg_key: str | None = None,
    ) -> None:
        kwargs: Mapping[str, Any] = {
            "engine_urls": list(engine_urls),
            "tokenizer_dir": str(tokenizer_dir),
            "host": host,
            "port": port,
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "request_timeout_s": request_timeout_s,
            "split_above": split_above,
            "log_dir": str(log_dir),
            "api_key_env": api_key_env,
            "smg_url": smg_url,
            "smg_key": smg_key,
        }
        self._request_timeout_s = request_timeout_s
        self._call_timeout_s = call_timeout_s
        self._group = worker_group_factory(target=PROXY, size=1, kwargs=kwargs, name="proxy")
        self._engine_urls: list[str] | None = None  # what `set_engines` said last; None: what the proxy started with
        self._started = False
        self._url = ""
        self._held = False
        self._untold = False  # the proxy may not know of `_held` or `_engine_urls`
        self._sending = threading.RLock()  # from the look at either until the call with it is on its way
        self._lives = 0  # how often the proxy was started again
        self._restarting = asyncio.Lock()
        self._watching_proxy: asyncio.Task[None] | None = None
        self._counted: Mapping[str, int] = {}  # by the proxy of now, when it was asked last
        self._counted_before: Mapping[str, int] = {}  # by those before it

    async def start(self) -> None:
        """Start the proxy process. Raises what its start raised."""
        await asyncio.to_thread(self._group.start)
        await self._greet()
        self._started = True
        self._counted = await self._group.call(0, "counts", timeout_s=self._call_timeout_s)
        self._watching_proxy = asyncio.get_running_loop().create_task(self._watch_proxy())

    async def _greet(self) -> None:
        """Where a new proxy listens; and what it does not know yet."""
        self._url = str(await self._group.call(0, "url", timeout_s=self._call_timeout_s))
        await self._tell_state()

    async def _tell_state(self) -> None:
        """All that the proxy must know. Another thread may change it between two calls here: it is told again."""
        while True:
            self._untold = False
            told = self._held, self._engine_urls
            if self._engine_urls is not None:
                await self._say_engines()
            await self._say_gate()
            if told == (self._held, self._engine_urls) and not self._untold:
                return

    async def _say_gate(self) -> None:
        await self._say(lambda: ("hold" if self._held else "release",))

    async def _say_engines(self) -> None:
        await self._say(lambda: ("set_engines", self._engine_urls))

    async def _say(self, now: Callable[[], tuple[Any, ...]]) -> None:
        """The call that `now` makes of what holds, sent before another thread can send a later one: a release that came
        behind the hold of a synchronisation would let requests through to engines that are about to be paused."""
        with self._sending:
            call = self._group.call(0, *now(), timeout_s=self._call_timeout_s)
            sent = asyncio.Task(call, loop=asyncio.get_running_loop(), eager_start=True)  # as far as its first wait
        await sent

    async def hold(self) -> None:
        """No request reaches an engine until `release`; from any event loop. A new proxy begins held, too."""
        self._held = True
        await self._tell("hold", self._say_gate)

    async def release(self) -> None:
        self._held = False
        await self._tell("release", self._say_gate)

    async def idle(self, timeout_s: float) -> int:
        """Wait until no request is on an engine; how many still are after `timeout_s`. 0 for a proxy that is gone."""
        limit_s = timeout_s + self._call_timeout_s
        return int(await self._tell("idle", lambda: self._group.call(0, "idle", timeout_s, timeout_s=limit_s)) or 0)

    async def _tell(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if not self._started:
            return None
        try:
            return await call()
        except (RL360Error, TimeoutError) as error:
            # A call that timed out is never made, also when the proxy only stood still: `_watch_proxy` tells it again.
            self._untold = True
            log.warning("the session proxy did not hear %s: %s", method, error)
            return None

    async def set_engines(self, urls: Sequence[str]) -> None:
        """The serving set from now on; callable from any event loop, before `start` too. A proxy that is just dying
        learns it when it is started again."""
        self._engine_urls = list(urls)
        await self._tell("set_engines", self._say_engines)

    async def open(self, spec: AttemptSpec) -> str:
        """Open a session; on a new proxy where the old one turns out to be dead."""
        lives = self._lives
        try:
            return str(await self._call("open", spec))
        except InfrastructureError as error:
            if error.cause != "proxy_session_lost" or self._lives == lives:
                raise
        return str(await self._call("open", spec))

    async def close_session(self, try_id: str) -> Session:
        session = await self._call("close_session", try_id)
        assert isinstance(session, Session)
        return session

    async def discard(self, try_id: str) -> None:
        await self._call("discard", try_id)

    async def health(self) -> bool:
        """Whether the proxy's HTTP server answers, the way agents reach it."""
        return await self._proxy_answers()

    async def _proxy_answers(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=min(HEALTH_TIMEOUT_S, self._call_timeout_s))
        try:
            async with aiohttp.ClientSession(timeout=timeout) as client, client.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def counts(self) -> Mapping[str, int]:
        """What failed under the sessions since the gateway started: `engine_resends`, `engine_moves`, ...,
        `proxy_restarts`. Of a proxy that died, what it said last.

        From any event loop; a proxy that does not answer is left as it is. Raises InfrastructureError or TimeoutError.
        """
        with contextlib.suppress(WorkerDied):
            self._counted = await self._group.call(0, "counts", timeout_s=self._call_timeout_s)
        return {**added(self._counted_before, self._counted), "proxy_restarts": self._lives}

    async def _watch_proxy(self) -> None:
        """Start the proxy again also where nobody asks it for anything: agents wait for it, and its counts are due.
        Tell it what it has not heard, or its sessions wait for good."""
        pause_s = WATCH_S
        while True:
            await asyncio.sleep(pause_s)
            life = self._lives
            try:
                if not self._group.alive(0):
                    await self._revive(life)
                elif self._untold:
                    await self._tell_again(life)
                pause_s = WATCH_S
            except Exception as error:  # whatever it was, the proxy must still be looked after
                log.error("%s", error)
                pause_s = FAILED_WATCH_S

    async def _tell_again(self, life: int) -> None:
        try:
            await self._tell_state()
        except BaseException as error:
            self._untold = True
            if isinstance(error, TimeoutError) and not await self._proxy_answers():
                await self._revive(life)
                return
            raise
        log.warning("the session proxy has heard of the serving set, and whether requests are held")

    async def _call(self, method: str, *args: Any) -> Any:
        life = self._lives
        try:
            return await self._group.call(0, method, *args, timeout_s=self._call_timeout_s)
        except WorkerDied as error:
            await self._revive(life)
            raise InfrastructureError("proxy_session_lost", str(error)) from error
        except InfrastructureError:
            raise
        except TimeoutError as error:
            if not await self._proxy_answers():
                await self._revive(life)
            raise InfrastructureError("proxy_timeout", f"{method}: {error}") from error
        except Exception as error:  # whatever the proxy raised comes back as itself, and costs this try only
            raise InfrastructureError("proxy_error", f"{method}: {error!r}") from error

    async def _revive(self, life: int) -> None:
        """Replace the proxy of this life, once for all the calls that found it dead."""
        async with self._restarting:
            if life != self._lives:
                return
            log.error("the session proxy died or hangs; starting it again, its open sessions are lost")
            self._counted_before = added(self._counted_before, self._counted)
            self._counted = dict.fromkeys(self._counted, 0)
            try:
                await asyncio.to_thread(self._group.restart, 0)
                await self._greet()
            except Exception as error:
                said = str(error) if isinstance(error, RL360Error | TimeoutError) else repr(error)
                raise InfrastructureError(
                    "proxy_start", f"the session proxy cannot be started again: {said}"
                ) from error
            self._lives += 1

    async def verify(self) -> None:
        """Send one request through the whole chain and check every field that training needs.

        Raises EngineError or InfrastructureError naming what is missing, before anything is trained on it.
        """
        await self._group.call(0, "verify", timeout_s=2 * self._request_timeout_s + CALL_TIMEOUT_S)
        spec = _verify_spec()
        base_url = await self.open(spec)
        try:
            reply = await self._ask(base_url)
        finally:
            session = await self.close_session(spec.try_id)
        problems = _problems(reply, session)
        if problems:
            raise EngineError(
                "engine_reply",
                "the first request: lost in the session proxy, what is behind it answered completely: "
                + "; ".join(problems),
            )

    async def close(self) -> None:
        async with self._restarting:  # a proxy that is just being started would be left behind
            if self._watching_proxy is not None:
                self._watching_proxy.cancel()
        await asyncio.to_thread(self._group.close)

    async def _ask(self, base_url: str) -> Mapping[str, Any]:
        body = {"messages": [{"role": "user", "content": "Say hello."}], "logprobs": True}
        timeout = aiohttp.ClientTimeout(total=self._request_timeout_s + CALL_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.post(f"{base_url}/chat/completions", json=body) as response,
            ):
                reply = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise InfrastructureError("proxy_unreachable", f"{base_url}: {error!r}") from error
        if response.status != 200:
            error_body = reply.get("error", {})
            raise InfrastructureError(
                error_body.get("code") or f"proxy_status_{response.status}", str(error_body.get("message"))
            )
        assert isinstance(reply, dict)
        return reply


def added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Counts of a process and of those that it replaces. What is, and has not happened, is the last one's alone."""
    return {name: value if name.endswith(GAUGE) else value + before.get(name, 0) for name, value in now.items()}


def _verify_spec() -> AttemptSpec:
    task = Task(task_id="verify", path=Path(), tags=(), content_hash="")
    sampling = Sampling(max_new_tokens=VERIFY_NEW_TOKENS, max_turns=1)
    return AttemptSpec("verify", "verify", -1, task, sampling, seed=0, purpose=Purpose.EVAL)


def _problems(reply: Mapping[str, Any], session: Session) -> list[str]:
    """What training would miss in a session of one turn."""
    problems = []
    if session.stop is Stop.INFRASTRUCTURE:
        problems.append(f"the session failed: {session.cause}")
    if len(session.segments) != 1 or len(session.turns) != 1:
        return [
            *problems,
            f"{len(session.segments)} segments and {len(session.turns)} turns were kept; expected 1 and 1",
        ]
    segment = session.segments[0]
    sampled = int(segment.loss_mask_T.sum())
    if sampled == 0 or sampled != reply["usage"]["completion_tokens"]:
        problems.append(f"usage.completion_tokens is {reply['usage']['completion_tokens']}, {sampled} tokens were kept")
    if not all(math.isfinite(p) and p <= 0 for p in segment.logprobs_T[segment.loss_mask_T].tolist()):
        problems.append("logprobs are not all finite and at most 0")
    if sum(span.end - span.start for span in segment.version_spans) != sampled:
        problems.append("weight_version does not cover every sampled token")
    if reply["choices"][0]["finish_reason"] not in ("stop", "length", "tool_calls"):
        problems.append(f"finish_reason is {reply['choices'][0]['finish_reason']!r}")
    return problems
