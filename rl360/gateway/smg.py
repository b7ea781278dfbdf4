"""The gateway of a run with many engines: the session proxy, then SMG, then the engines.

In: as DirectGateway. Out: the same sessions; SMG chooses a session's engine and keeps it there. Left to others: SMG's
process and its engines (smg_worker.py, in a process of its own), requests (smg_route.py).

Control calls (pause, flush, weights, abort) never pass SMG. Its address is the same for the whole run: when it dies it
is started again there, and the proxy sends again what was lost, and counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl360.errors import InfrastructureError, RL360Error
from rl360.gateway.direct import CALL_TIMEOUT_S, DirectGateway, added
from rl360.gateway.generation import LONGEST_BY_EXPRESSION
from rl360.gateway.ports import free_port
from rl360.gateway.smg_process import require_smg
from rl360.protocols import WorkerGroup
from rl360.types import AttemptSpec

log = logging.getLogger(__name__)

SMG = "rl360.gateway.smg_worker:SmgWorker"
WATCH_S = 1.0
TELL_S = 30.0  # more than smg_worker.REGISTER_S, for which the worker waits for engines that join
# Its keeper answers at once unless it hangs; then engines that die stay in SMG, and others do not come. About as long
# as requests are sent again for an engine that is gone (smg_route.GONE_FOR_S).
KEEPER_HANGS_S = 20.0
CLOSE_MARGIN_S = 3.0  # for the worker around SMG, after SMG's own time to stop
KEY_BYTES = 24


class SmgGateway(DirectGateway):
    """Implements protocols.Gateway. See docs/guide/gateway.md.

    Args:
        smg_port, metrics_port, policy, start_timeout_s, stop_timeout_s, health_interval_s, smg_args: of
            SmgGatewayConfig. The others are DirectGateway's.

    Raises ConfigError from `start` when SMG is not installed, InfrastructureError `smg_start` from `start`, and from
    `open` when SMG cannot be started again.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key_env: str | None = None,
        smg_port: int = 0,
        metrics_port: int = 0,
        policy: str = "manual",
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 10.0,
        health_interval_s: float = 1.0,
        smg_args: Sequence[str] = (),
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
    ) -> None:
        # Without a key of the engines' own, one of ours keeps everybody but the proxy from SMG's list of engines.
        key = "" if api_key_env else secrets.token_hex(KEY_BYTES)
        smg_port = smg_port or free_port(host)
        super().__init__(
            host,
            port,
            api_key_env,
            engine_urls=engine_urls,
            tokenizer_dir=tokenizer_dir,
            worker_group_factory=worker_group_factory,
            log_dir=log_dir,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            request_timeout_s=request_timeout_s,
            split_above=split_above,
            call_timeout_s=call_timeout_s,
            smg_url=f"http://{host}:{smg_port}",
            smg_key=key,
        )
        kwargs: Mapping[str, Any] = {
            "engine_urls": list(engine_urls),
            "host": host,
            "port": smg_port,
            "metrics_port": metrics_port or free_port(host),
            "policy": policy,
            "request_timeout_s": request_timeout_s,
            "start_timeout_s": start_timeout_s,
            "stop_timeout_s": stop_timeout_s,
            "health_interval_s": health_interval_s,
            "smg_args": list(smg_args),
            "log_dir": str(log_dir),
            "api_key_env": api_key_env,
            "smg_key": key,
        }
        self._close_s = stop_timeout_s + CLOSE_MARGIN_S
        self._smg_kwargs = kwargs
        self._make_group = worker_group_factory
        self._smg_group = self._make_group(target=SMG, size=1, kwargs=kwargs, name="smg")
        self._watching: asyncio.Task[None] | None = None
        self._smg_state: Mapping[str, Any] = {}
        self._smg_counted_before: Mapping[str, int] = {}  # by keepers before the one of now
        self._worker_restarts = 0
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Start SMG with every engine, then the proxy. Raises what their start raised."""
        require_smg()
        await asyncio.to_thread(self._smg_group.start)
        if self._engine_urls is not None:
            await self._tell_smg(self._engine_urls)
        await super().start()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def open(self, spec: AttemptSpec) -> str:
        if failure := self._smg_state.get("failure"):
            raise InfrastructureError("smg_start", str(failure))
        return await super().open(spec)

    async def set_engines(self, urls: Sequence[str]) -> None:
        """As DirectGateway's: SMG first, which gives the sessions of an engine that left to others."""
        self._engine_urls = list(urls)  # before anything: a keeper that is just being replaced begins with it
        if self._started:
            await self._tell_smg(urls)
        await super().set_engines(urls)

    async def health(self) -> bool:
        """Whether the proxy answers and SMG has an engine to give requests to."""
        with contextlib.suppress(RL360Error, TimeoutError):
            self._smg_state = await self._smg_group.call(0, "state", timeout_s=self._call_timeout_s)
            return bool(self._smg_state["engines"]) and not self._smg_state["failure"] and await super().health()
        return False

    async def counts(self) -> Mapping[str, int]:
        """As DirectGateway's, and `smg_restarts`."""
        state = added(self._smg_counted_before, _counts_in(self._smg_state))
        state["smg_restarts"] = state.get("smg_restarts", 0) + self._worker_restarts
        return {**await super().counts(), **state}

    async def close(self) -> None:
        if self._watching is not None:
            async with self._replacing:  # a keeper that is just being started would be left behind
                self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().close()
        await asyncio.to_thread(self._smg_group.close, self._close_s)

    async def _tell_smg(self, urls: Sequence[str]) -> None:
        try:
            await self._smg_group.call(0, "set_engines", list(urls), timeout_s=TELL_S)
        except (RL360Error, TimeoutError) as error:  # `_watch` tells it again
            log.warning("smg was not told of the serving set: %s", error)

    async def _watch(self) -> None:
        """Know SMG's state, and start its keeper again when that died (SMG died with it) or hangs."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                if not self._smg_group.alive(0):
                    await self._replace_keeper("died")
                try:
                    timeout_s = min(KEEPER_HANGS_S, self._call_timeout_s)
                    self._smg_state = await self._smg_group.call(0, "state", timeout_s=timeout_s)
                except TimeoutError:
                    await self._replace_keeper("hangs")
                else:
                    if self._engine_urls is not None and set(self._smg_state["wanted"]) != set(self._engine_urls):
                        await self._tell_smg(self._engine_urls)
            except Exception as error:  # whatever it was, SMG must still be looked after
                log.error("smg: %s", error if isinstance(error, RL360Error | TimeoutError) else repr(error))
                if getattr(error, "cause", "") == "smg_start":
                    self._smg_state = {**self._smg_state, "failure": str(error)}

    async def _replace_keeper(self, why: str) -> None:
        """A new one with the serving set of now: the one that the run began with may have lost engines, for which a
        start would wait in vain."""
        log.error("the worker that keeps smg %s; starting both again", why)
        self._worker_restarts += 1
        counted = _counts_in(self._smg_state)
        self._smg_counted_before = added(self._smg_counted_before, counted)
        self._smg_state = {**self._smg_state, **dict.fromkeys(counted, 0)}
        now = {} if self._engine_urls is None else {"engine_urls": list(self._engine_urls)}
        kwargs = {**self._smg_kwargs, **now, "await_all": False}
        async with self._replacing:
            await asyncio.to_thread(self._smg_group.close, 0.0)
            self._smg_group = self._make_group(target=SMG, size=1, kwargs=kwargs, name="smg")
            await asyncio.to_thread(self._smg_group.start)
        if self._engine_urls is not None:
            await self._tell_smg(self._engine_urls)


def _counts_in(state: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in state.items() if isinstance(value, int) and name != "pid"}
