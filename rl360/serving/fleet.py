"""N servers and the serving set: who may be asked. Watches them, replaces the dead and the hung.

In: launches, and how a replacement gets the current weights (`bring_up`). Out: the serving set, told to whoever asked
for changes. A server leaves the set the moment it is known to be bad, is ended and started again on the same port, and
comes back only when its weights are the current ones. Requests that it had are asked of others by the gateway's pool.

Each server has a thread that lives through all its lives. While the fleet is suspended (engines paused or their memory
released) nobody is killed for being slow; a process that ends is still noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rl360.errors import InfrastructureError, RL360Error
from rl360.gateway.ports import port_problem
from rl360.serving.command import Launch
from rl360.serving.process import ServerProcess

log = logging.getLogger(__name__)

WATCH_POLL_S = 0.1
RESTART_PAUSE_S = 1.0  # doubled with each restart of the same server, so that a broken one does not spin
LONGEST_PAUSE_S = 60.0

OnChange = Callable[[tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Seconds and counts; see `SGLangConfig`."""

    start_timeout_s: float = 900.0
    health_interval_s: float = 5.0
    health_timeout_s: float = 10.0
    health_failures: int = 3  # in a row: then it hangs
    max_restarts: int = 5  # of one server in the run; then it is given up
    grace_s: float = 10.0  # between SIGTERM and SIGKILL


@dataclass(slots=True, eq=False)
class _Server:
    launch: Launch
    process: ServerProcess | None = None
    serving: bool = False
    restarts: int = 0
    given_up: str | None = None  # why its last life ended
    condemned: str | None = None  # why the others want it replaced
    ended_for_memory: bool = False  # by `hold_starts`: no fault of its own
    ready: threading.Event = field(default_factory=threading.Event)  # of the first life: ready or failed
    failure: RL360Error | None = None


class Fleet:
    """See the module's docstring. `start` before anything else but `begin`, `close` at the end; both block.

    Args:
        bring_up: called with the URL of a replacement that is ready, from its thread; returns when its weights are the
            current ones and raises RL360Error when they cannot be. Set it before a server can fail.
        api_key: that the servers are to ask for; None: none.
    """

    def __init__(
        self, launches: Sequence[Launch], log_dir: Path, watch: WatchSettings | None = None, api_key: str | None = None
    ) -> None:
        self._servers = [_Server(launch) for launch in launches]
        self._log_dir = log_dir
        self._watch = watch or WatchSettings()
        self._api_key = api_key
        self._closing = threading.Event()
        self._suspended = 0
        self._starts_held = threading.Event()
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # changes are told in order
        self._listeners: list[OnChange] = []
        self._threads: list[threading.Thread] = []
        self.bring_up: Callable[[str], None] = lambda url: None

    def begin(self) -> None:
        """Start all at once and wait for none."""
        for server in self._servers:
            # The kernel ties a server to its keeper and the keeper to the driver's pipe, not to this thread.
            thread = threading.Thread(
                target=self._live, args=(server,), name=f"server-{server.launch.index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def start(self) -> tuple[str, ...]:
        """Start all at once, where they have not begun, and wait for all. Raises what one start raised, and leaves no
        process then."""
        if not self._threads:
            self.begin()
        try:
            for server in self._servers:
                server.ready.wait()
            failed = [server.failure for server in self._servers if server.failure is not None]
            if failed:
                raise failed[0]
        except BaseException:
            self.close()
            raise
        return self.serving()

    def urls(self) -> tuple[str, ...]:
        """Of every server, whatever its state; they stay the same through restarts."""
        return tuple(server.launch.url for server in self._servers)

    def serving(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(server.launch.url for server in self._servers if server.serving)

    def hopeless(self) -> str | None:
        """Why no server will ever serve again; None while one may."""
        reasons = [server.given_up for server in self._servers]
        if any(reason is None for reason in reasons):
            return None
        said = "; ".join(f"server {one.launch.index}: {one.given_up}" for one in self._servers)
        return f"each was started again {self._watch.max_restarts} times (rollout.sglang.max_restarts); {said}"

    def restarts(self) -> int:
        return sum(server.restarts for server in self._servers)

    def pid(self, url: str) -> int:
        """Of the keeper of the server's present life: for logs and tests."""
        process = self._of(url).process
        assert process is not None
        return process.keeper_pid

    def leave(self, url: str, reason: str) -> None:
        """Take a server out of the set now; it is ended and replaced in the background. Nothing, where that is so."""
        server = self._of(url)
        with self._lock:
            if not server.serving:
                return
            server.condemned = reason
        self._serve(server, False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nobody is killed for not answering inside: engines are paused, loading, or have no memory."""
        with self._lock:
            self._suspended += 1
        try:
            yield
        finally:
            with self._lock:
                self._suspended -= 1

    def hold_starts(self, keep: Collection[str] = ()) -> None:
        """No server starts until `allow_starts`, and none is left that does not serve (but for `keep`): somebody else
        has the memory that it would take. Returns when they are gone; they are started again later."""
        with self._lock:
            self._starts_held.set()
            waiting = [s for s in self._servers if not s.serving and s.launch.url not in keep]
            processes = [s.process for s in waiting if s.process is not None]
            for server in waiting:
                server.ended_for_memory = server.process is not None and server.condemned is None
        for process in processes:
            process.close(at_once=True)

    def allow_starts(self) -> None:
        self._starts_held.clear()

    def on_change(self, tell: OnChange) -> None:
        """`tell(serving set)` after every change, from whichever thread made it. What it raises is logged only."""
        self._listeners.append(tell)

    def close(self) -> None:
        """End every server. Idempotent."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # -- one server's thread -----------------------------------------------------------------------------------------

    def _live(self, server: _Server) -> None:
        index = server.launch.index
        try:
            while not self._closing.is_set() and server.given_up is None:
                first = not server.ready.is_set()
                while self._starts_held.is_set() and not self._closing.wait(WATCH_POLL_S):
                    pass
                try:
                    why = self._one_life(server, first)
                except Exception as error:
                    why = str(error)
                    if not isinstance(error, RL360Error):
                        # A log that cannot be written, a trainer without memory for a bucket: whatever it was, somebody
                        # must start this server again, or say that nobody will.
                        log.exception("server %d: its start failed", index)
                        error = InfrastructureError("engine_start", f"server {index}: {error!r}")
                    if first:
                        server.failure = error
                        return
                finally:
                    self._serve(server, False)
                    self._end(server)
                    server.ready.set()
                if self._closing.is_set():
                    return
                if server.ended_for_memory:
                    server.ended_for_memory = False
                    continue
                server.restarts += 1
                if server.restarts > self._watch.max_restarts:
                    server.given_up = why
                    log.error("server %d is given up after %d restarts: %s", index, self._watch.max_restarts, why)
                    return
                pause_s = min(RESTART_PAUSE_S * 2 ** (server.restarts - 1), LONGEST_PAUSE_S)
                log.warning("server %d is started again in %g s: %s", index, pause_s, why)
                self._closing.wait(pause_s)
        finally:
            server.ready.set()

    def _one_life(self, server: _Server, first: bool) -> str:
        """Start, join the set, watch; returns why it must be replaced. Raises RL360Error when it cannot start."""
        server.condemned = None
        server.ended_for_memory = False
        address = urlsplit(server.launch.url)
        if problem := port_problem(address.hostname or "", address.port or 0):
            # Whoever listens there would be taken for ours, and given our weights.
            raise InfrastructureError("engine_start", f"server {server.launch.index}: {problem}")
        log_path = self._log_dir / f"sglang-{server.launch.index}.log"
        with self._lock:
            if self._starts_held.is_set() or self._closing.is_set():
                server.ended_for_memory = True
                return "its memory is somebody else's"
            process = ServerProcess(server.launch, log_path, self._watch.grace_s, self._api_key)
            server.process = process
        if not process.wait_ready(self._watch.start_timeout_s, self._closing.is_set):
            return "closing"
        if not first:
            self.bring_up(process.url)
        self._serve(server, True)
        server.ready.set()
        return self._watch_over(server, process)

    def _watch_over(self, server: _Server, process: ServerProcess) -> str:
        failures = 0
        asked = time.monotonic()
        while not self._closing.wait(WATCH_POLL_S):
            if (code := process.exit_code()) is not None:
                return f"it ended with code {code}; {process.log_tail()}"
            if server.condemned is not None:
                return server.condemned
            if time.monotonic() - asked < self._watch.health_interval_s:
                continue
            well = process.well(self._watch.health_timeout_s)
            asked = time.monotonic()
            failures = 0 if well or self._suspended else failures + 1
            if failures >= self._watch.health_failures:
                return f"it hangs: {failures} checks in a row without an answer"
        return "closing"

    def _end(self, server: _Server) -> None:
        if server.process is not None:
            server.process.close(at_once=not self._closing.is_set())
            server.process = None

    def _serve(self, server: _Server, serving: bool) -> None:
        with self._telling:
            with self._lock:
                if server.serving == serving:
                    return
                server.serving = serving
                now = tuple(one.launch.url for one in self._servers if one.serving)
            if self._closing.is_set():
                return
            for tell in self._listeners:
                try:
                    tell(now)
                except Exception:
                    log.exception("the serving set was not told to a listener")

    def _of(self, url: str) -> _Server:
        for server in self._servers:
            if server.launch.url == url:
                return server
        raise InfrastructureError("engine_start", f"{url} is none of this fleet's servers")
