"""SMG itself: its arguments, its process, and the few calls that it answers.

In: addresses, limits and a key. Out: a running SMG without engines, then its list of them. Left to others: which
engines it should have, and what happens when it dies (smg_worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.errors import ConfigError, EngineError, InfrastructureError
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.ports import port_problem

log = logging.getLogger(__name__)

POLL_S = 0.05
CALL_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000
QUOTED_CHARS = 300
NEVER_S = 10**8  # for limits of SMG that would take an engine out of its routing by themselves
STICKY_S = 7 * 86400  # how long a session may be silent and still find its engine
LEAST_REQUEST_TIMEOUT_S = 1800
INSTALL = "pip install 'rl360[cluster]'"
# It talks to engines of ours only, and a cluster's proxy does not know them.
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class SmgSettings:
    """Where it listens and how it chooses. Ports are fixed: it comes back to the same address."""

    host: str
    port: int
    metrics_port: int
    policy: str
    request_timeout_s: float
    stop_timeout_s: float
    extra_args: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Listed:
    """One engine as SMG lists it."""

    worker_id: str
    ready: bool
    draining: bool


def require_smg() -> None:
    """Raises ConfigError when the package is not there."""
    if importlib.util.find_spec("smg") is None:
        raise ConfigError(f"gateway=smg: the package smg is not installed; it is in the extra `cluster`: {INSTALL}")


def launch_arguments(settings: SmgSettings) -> list[str]:
    """`smg launch`'s arguments: nothing in it retries, sheds, breaks circuits or drops engines by itself.

    A lost request is sent again by the proxy, which counts it, and which engines serve is decided by smg_worker.py.
    What SMG would do otherwise: send a 429 or 503 to another engine, leave out engines with eight waiting requests, or
    those that finish nothing for three seconds, as long generations and paused engines do.
    """
    choice = ["--policy", settings.policy]
    if settings.policy == "manual":
        choice += ["--assignment-mode", "min_load", "--max-idle-secs", str(STICKY_S)]
    return [
        *("--host", settings.host, "--port", str(settings.port)),
        *("--prometheus-host", settings.host, "--prometheus-port", str(settings.metrics_port)),
        *choice,
        "--disable-retries",
        "--disable-circuit-breaker",
        "--disable-worker-overload-protection",
        "--disable-health-check",
        "--disable-load-monitoring",
        "--disable-tokenizer-autoload",
        *("--worker-wedge-secs", str(NEVER_S), "--worker-stall-secs", str(NEVER_S), "--worker-stale-secs", "0"),
        *("--max-concurrent-requests", "0"),
        *("--request-timeout-secs", str(max(LEAST_REQUEST_TIMEOUT_S, int(2 * settings.request_timeout_s)))),
        *("--shutdown-grace-period-secs", str(max(1, int(settings.stop_timeout_s)))),
        *("--history-backend", "none"),
        *("--log-level", "warn", "--log-json"),
        *settings.extra_args,
    ]


def smg_environment() -> dict[str, str]:
    """This process's own, without proxies."""
    kept = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class SmgProcess:
    """One life of SMG. `start` may be called again after it ended."""

    def __init__(self, settings: SmgSettings, key: str, log_path: Path) -> None:
        self._settings = settings
        self._key = key
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._client = HttpEngine(settings.url, control_timeout_s=CALL_TIMEOUT_S, api_key=key or None)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    async def start(self, timeout_s: float) -> None:
        """Start it and wait until it answers.

        Raises InfrastructureError `smg_start`: a port that is taken, or the end of its log.
        """
        require_smg()
        for port in (self._settings.port, self._settings.metrics_port):
            if problem := port_problem(self._settings.host, port):
                raise InfrastructureError("smg_start", problem)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "rl360.gateway.smg_main", *launch_arguments(self._settings)),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=smg_environment(),
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._key.encode() + b"\n")
        self._process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answers():
                    if self._process.returncode is not None:
                        raise InfrastructureError(
                            "smg_start", f"smg ended with code {self._process.returncode}; {self.log_end()}"
                        )
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self.kill()
            raise InfrastructureError(
                "smg_start", f"smg did not answer at {self._settings.url} within {timeout_s:g} s; {self.log_end()}"
            ) from None

    async def wait(self) -> int:
        """Until it ends; its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Let it finish what is open, then end it."""
        if self._process is None or self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._settings.stop_timeout_s):
                await self._process.wait()
        except TimeoutError:
            log.warning("smg did not end %g s after SIGTERM; killing it", self._settings.stop_timeout_s)
            await self.kill()

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def close(self) -> None:
        """Stop it and close the connections to it."""
        await self.stop()
        await self._client.close()

    async def engines(self) -> Mapping[str, Listed]:
        """The engines that it has, by URL. Raises EngineError."""
        reply = await self._json("GET", "/workers", None)
        try:
            return {
                str(row["url"]).rstrip("/"): Listed(
                    str(row["id"]), bool(row["is_healthy"]) and row["status"] == "ready", row["status"] == "draining"
                )
                for row in reply["workers"]
            }
        except (KeyError, TypeError) as error:
            raise EngineError("engine_reply", f"smg GET /workers: {error!r} in {str(reply)[:QUOTED_CHARS]}") from None

    async def add(self, url: str) -> None:
        """Ask it to take an engine; it registers in the background. Raises EngineError."""
        body = {"url": url, "runtime_type": "sglang", **({"api_key": self._key} if self._key else {})}
        await self._json("POST", "/workers", body)

    async def remove(self, worker_id: str) -> None:
        """No new request goes there from now on; it forgets the engine 5 s later. Raises EngineError."""
        await self._json("DELETE", f"/workers/{worker_id}", None)

    def log_end(self) -> str:
        """The end of its log, for messages. The key does not stand in it."""
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - LOG_TAIL_BYTES))
                return f"its log {self._log_path} ends:\n{file.read().decode(errors='replace')}"
        except OSError as error:
            return f"no log: {error}"

    async def _answers(self) -> bool:
        try:
            status, _, _ = await self._client.exchange("GET", "/liveness", None, CALL_TIMEOUT_S)
        except EngineError:
            return False
        return status == 200

    async def _json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        status, raw, _ = await self._client.exchange(method, path, body, CALL_TIMEOUT_S)
        if status >= 400:
            raise EngineError(f"engine_status_{status}", f"smg {method} {path}: {_quote(raw)}")
        with contextlib.suppress(ValueError):
            if isinstance(reply := json.loads(raw), dict):
                return reply
        raise EngineError("engine_reply", f"smg {method} {path} answered no object: {_quote(raw)}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _quote(raw: bytes) -> str:
    return raw[:QUOTED_CHARS].decode(errors="replace")


def refused_arguments(arguments: Sequence[str]) -> list[str]:
    """Those of the user's own arguments that would undo what is set here, or store a key."""
    ours = {"--host", "--port", "--prometheus-port", "--worker-urls", "--policy"}
    secret = {"--api-key", "--tenant-api-key", "--control-plane-api-keys"}
    names = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("--")]
    return [name for name in names if name in ours | secret]
