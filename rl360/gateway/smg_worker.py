"""Keeps SMG running and its engines right, in a process of its own.

In: the engines that it should have (`set_engines`). Out: SMG at one address for the whole run, which has those of them
that answer. Left to others: SMG's process (smg_process.py), requests (smg_route.py), starting and ending engines.

SMG that dies or hangs is started again at the same address and gets its engines back. An engine that refuses
connections is taken out; it comes back when it answers and its weights are not older than the others': one that came
back by itself may have those that it was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.errors import ConfigError, EngineError, InfrastructureError
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.smg_process import Listed, SmgProcess, SmgSettings, require_smg
from rl360.open_files import allow_many

log = logging.getLogger(__name__)

REGISTER_POLL_S = 0.1
REGISTER_S = 10.0  # for engines that join a running SMG: 0.1 s, and 5 s when they left it just now
LOOK_TIMEOUT_S = 5.0
HANGS_AFTER = 3  # calls in a row that SMG did not answer in time
RESTART_PAUSE_S = 0.2  # doubled with each start that failed
MOST_FAILED_STARTS = 5


@dataclass(frozen=True, slots=True)
class _Look:
    """What an engine says of itself. `there`: somebody listens; None: no word in time."""

    there: bool | None
    version: int | None = None
    problem: str = ""  # why there is no version


class SmgWorker:
    """Runs under a WorkerGroup of size 1.

    Args:
        rank: of the worker group.
        engine_urls: the serving set.
        await_all: all of it must be there for `start`; false: who does not come soon is tried for on.
        host, port, metrics_port, policy, smg_args: see SmgGatewayConfig; ports that are fixed.
        request_timeout_s: of one model call.
        start_timeout_s: until SMG answers and has every engine.
        stop_timeout_s: between SIGTERM and SIGKILL.
        health_interval_s: how often SMG and the engines are looked at.
        log_dir: smg.log goes there.
        api_key_env: name of the variable with the engines' key, which is then SMG's too; None: `smg_key`.
        smg_key: keeps everybody but the proxy from SMG, where the engines have no key.
    """

    def __init__(
        self,
        rank: int,
        engine_urls: Sequence[str],
        host: str,
        port: int,
        metrics_port: int,
        log_dir: str | Path,
        policy: str = "manual",
        request_timeout_s: float = 120.0,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 10.0,
        health_interval_s: float = 1.0,
        smg_args: Sequence[str] = (),
        api_key_env: str | None = None,
        smg_key: str = "",
        await_all: bool = True,
    ) -> None:
        if api_key_env and api_key_env not in os.environ:
            raise ConfigError(f"gateway.api_key_env: {api_key_env} is not set in the environment")
        key = os.environ[api_key_env] if api_key_env else smg_key
        settings = SmgSettings(host, port, metrics_port, policy, request_timeout_s, stop_timeout_s, tuple(smg_args))
        self._smg = SmgProcess(settings, key, Path(log_dir) / "smg.log")
        self._url = settings.url
        self._wanted = list(dict.fromkeys(engine_urls))
        self._engine_key = key if api_key_env else None
        self._await_all = await_all
        self._start_timeout_s = start_timeout_s
        self._interval_s = health_interval_s
        self._clients: dict[str, HttpEngine] = {}
        self._newest_version: int | None = None  # None: nobody has joined yet, so nobody is behind
        self._joined: set[str] = set()
        self._waits: dict[str, str] = {}  # engine -> why it is not in
        self._reconciling = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._restarts = self._times_left_out = 0
        self._failure: InfrastructureError | None = None

    async def start(self) -> None:
        """Raises ConfigError when SMG is not installed, InfrastructureError `smg_start` naming what did not come."""
        require_smg()
        allow_many()  # SMG has it from here
        await self._smg.start(self._start_timeout_s)
        try:
            patience_s = self._start_timeout_s if self._await_all else REGISTER_S
            missing = await self._until_registered(patience_s, self._wanted)
        except BaseException:
            await self._smg.close()
            raise
        if missing and self._await_all:
            await self._smg.close()
            reasons = "; ".join(f"{url}: {self._waits.get(url, 'not registered')}" for url in missing)
            raise InfrastructureError(
                "smg_start", f"after {self._start_timeout_s:g} s smg lacks engines: {reasons}; {self._smg.log_end()}"
            )
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_running()), loop.create_task(self._keep_engines())]
        log.info("smg (pid %d) at %s has %d engine(s)", self._smg.pid, self._url, len(self._wanted) - len(missing))

    def url(self) -> str:
        return self._url

    async def set_engines(self, urls: Sequence[str]) -> list[str]:
        """The serving set from now on. Returns those that SMG has within REGISTER_S; the others are tried for on."""
        before, self._wanted = set(self._wanted), list(dict.fromkeys(urls))
        missing = await self._until_registered(REGISTER_S, [url for url in self._wanted if url not in before])
        if missing:
            log.warning("smg lacks %s", ", ".join(f"{url} ({self._waits.get(url)})" for url in missing))
        return [url for url in self._wanted if url not in missing]

    def state(self) -> Mapping[str, Any]:
        """For the driver: counts, which engines SMG should have and has, why it was given up (None: it was not)."""
        return {
            "smg_restarts": self._restarts,
            "engines_left_out": self._times_left_out,
            "engines_left_out_now": sum(url not in self._joined for url in self._wanted),
            "engines": sorted(self._joined),
            "wanted": list(self._wanted),
            "pid": self._smg.pid,
            "failure": None if self._failure is None else str(self._failure),
        }

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._smg.close()
        await asyncio.gather(*(client.close() for client in self._clients.values()), return_exceptions=True)

    # -- SMG's process -----------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        while True:
            code = await self._smg.wait()
            log.error("smg ended with code %d; starting it again. %s", code, self._smg.log_end())
            self._restarts += 1
            for attempt in range(MOST_FAILED_STARTS):
                try:
                    await self._smg.start(self._start_timeout_s)
                    break
                except Exception as error:
                    self._failure = InfrastructureError("smg_start", f"smg cannot be started again: {error}")
                    log.error("%s", self._failure)
                    await asyncio.sleep(RESTART_PAUSE_S * 2**attempt)
            else:
                return
            self._failure = None
            await self._until_registered(REGISTER_S, self._wanted)
            log.warning("smg (pid %d) is back with %s", self._smg.pid, ", ".join(sorted(self._joined)) or "no engine")

    # -- its engines -------------------------------------------------------------------------------------------------

    async def _keep_engines(self) -> None:
        silent = 0
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._reconcile()
                silent = 0
            except EngineError as error:
                silent = silent + 1 if error.cause == "engine_timeout" else 0  # one that is gone is started already
                if silent >= HANGS_AFTER:
                    log.error("smg does not answer; killing it: %s", error)
                    await self._smg.kill()
            except Exception:  # whatever it was, engines must still be looked after
                log.exception("looking after the engines failed")

    async def _until_registered(self, timeout_s: float, awaited: Sequence[str]) -> list[str]:
        """Reconcile, at least once, until SMG has the awaited engines. Returns those that it lacks."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            with contextlib.suppress(EngineError):
                await self._reconcile()
            missing = [url for url in awaited if url not in self._joined]
            if not missing or asyncio.get_running_loop().time() > deadline:
                return missing
            await asyncio.sleep(REGISTER_POLL_S)

    async def _reconcile(self) -> None:
        """One step from what SMG has to what it should have. Raises EngineError when SMG does not answer."""
        async with self._reconciling:
            wanted = list(self._wanted)
            self._forget(wanted)
            listed = await self._smg.engines()
            for url, row in listed.items():
                if url not in wanted:
                    await self._take_out(url, row, "it left the serving set")
            looks = dict(zip(wanted, await asyncio.gather(*(self._look(url) for url in wanted)), strict=True))
            for url, row in listed.items():
                if url in looks and looks[url].there is False:
                    self._times_left_out += not row.draining
                    self._waits[url] = "it refuses connections"
                    await self._take_out(url, row, "it refuses connections")
            ready = {url for url, row in listed.items() if row.ready}
            self._joined = {url for url in wanted if url in ready and looks[url].there is not False}
            versions = [self._newest_version, *(looks[url].version for url in self._joined)]
            self._newest_version = max((v for v in versions if v is not None), default=None)
            for url in wanted:
                if url not in listed and self._may_join(url, looks[url]):
                    await self._smg.add(url)

    def _may_join(self, url: str, look: _Look) -> bool:
        if not look.there:
            self._waits[url] = "nobody listens there" if look.there is False else "no answer in time"
        elif look.version is None:
            self._waits[url] = look.problem
        elif self._newest_version is not None and look.version < self._newest_version:
            self._waits[url] = f"it serves version {look.version}, the others {self._newest_version}"
        else:
            self._waits[url] = "smg does not register it"
            return True
        return False

    async def _take_out(self, url: str, row: Listed, why: str) -> None:
        if not row.draining:
            log.warning("engine %s is taken out of smg: %s", url, why)
            await self._smg.remove(row.worker_id)

    async def _look(self, url: str) -> _Look:
        try:
            return _Look(True, await self._client(url).version())
        except EngineError as error:
            if error.cause == "engine_refused":
                return _Look(False)
            return _Look(None if error.cause == "engine_timeout" else True, problem=str(error))

    def _client(self, url: str) -> HttpEngine:
        if url not in self._clients:
            self._clients[url] = HttpEngine(url, control_timeout_s=LOOK_TIMEOUT_S, api_key=self._engine_key)
        return self._clients[url]

    def _forget(self, wanted: Sequence[str]) -> None:
        for url in [url for url in self._waits if url not in wanted]:
            del self._waits[url]
