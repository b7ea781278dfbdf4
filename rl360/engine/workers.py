"""Worker processes on this machine: one class, N ranks, calls over private sockets.

In: `module:Class` with its keyword arguments, and calls from any asyncio loop. Out: results, the worker's own
exceptions, `WorkerDied` at once when a process ends under open calls, and one log file per rank. Left to others: what
the class does, and whether a dead rank is restarted (the caller knows what its calls were worth).

A worker is a fresh interpreter (worker_main.py), in its own session so that Ctrl-C reaches the driver alone. It dies
with the driver: end of stream and PR_SET_PDEATHSIG. Closing ends its whole process group.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl360.engine.wire import START_CALL_ID, FrameReader, Kind, frame, load_error
from rl360.errors import InfrastructureError, RL360Error, WorkerDied

RECV_BYTES = 1 << 20
LOG_TAIL_BYTES = 2000  # of a dead worker's log, quoted in the error
REAP_S = 5.0  # between SIGKILL and the process being gone; longer means an uninterruptible sleep


class LocalWorkerGroup:
    """`size` processes that each run one object of `target`; implements protocols.WorkerGroup.

    Args:
        target: `module:Class`. Built in the worker as `Class(**kwargs, rank=rank)`; `async start()` and
            `async close()` are called when it has them. A method that is not async blocks the worker's loop.
        size: number of workers.
        kwargs: picklable constructor arguments.
        name: names the log files `<log_dir>/<name>-<rank>.log` and the processes in `ps`.
        log_dir: made when absent.
        env: added to the driver's environment.
        start_timeout_s: for import, construction and start() of one worker.
    """

    def __init__(
        self,
        target: str,
        size: int,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str = "worker",
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        module, _, cls = target.partition(":")
        if not module or not cls:
            raise RL360Error(f"worker target {target!r}: expected 'module:Class'")
        if size < 1:
            raise RL360Error(f"worker group {name!r}: size {size}, expected at least 1")
        self.size = size
        self._target = target
        self._packed_kwargs = pickle.dumps(dict(kwargs or {}))
        self._name = name
        self._log_dir = Path(log_dir)
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._workers: list[_Worker] = []
        self._restarting = threading.Lock()

    def start(self) -> None:
        """Start every worker and wait for all. Raises what a worker's start raised (RL360Error classes as they are,
        others as InfrastructureError `worker_start` with the text) and then leaves no process behind."""
        if self._workers:
            raise RL360Error(f"worker group {self._name!r}: already started")
        self._log_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._start_timeout_s
        try:
            for rank in range(self.size):
                self._workers.append(self._spawn(rank))
            for worker in self._workers:
                worker.wait_started(deadline, self._start_timeout_s)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    async def call(self, rank: int, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Run `method(*args)` in worker `rank`. Usable from any loop, many at once.

        Raises what the method raised (same class where it can be pickled, else RL360Error), `WorkerDied` with cause
        `worker_died` when the process ends first, `TimeoutError` after `timeout_s` (None: no limit). A call that times
        out or is cancelled is cancelled in the worker too.
        """
        if not self._workers:
            raise RL360Error(f"worker group {self._name!r}: not started, or closed")
        worker = self._workers[rank]
        call_id, future = worker.open_call(method, args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except asyncio.CancelledError:
            worker.cancel_call(call_id)
            raise
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the method's own TimeoutError
            worker.cancel_call(call_id)
            raise TimeoutError(f"{worker.label}.{method}: no answer after {timeout_s:g} s") from error

    def alive(self, rank: int) -> bool:
        return bool(self._workers) and not self._workers[rank].ended.is_set()

    def pid(self, rank: int) -> int:
        """Process id of worker `rank`, also its process group and session."""
        return self._workers[rank].pid

    def restart(self, rank: int) -> None:
        """Start worker `rank` again and wait for it; one that still runs is killed first. Errors as in start()."""
        with self._restarting:
            self._workers[rank].close(deadline=0.0)
            worker = self._spawn(rank)
            try:
                worker.wait_started(time.monotonic() + self._start_timeout_s, self._start_timeout_s)
            except BaseException:
                worker.close(deadline=0.0)
                raise
            self._workers[rank] = worker

    def dump_stacks(self) -> None:
        """Ask every living worker to write its threads and tasks to its log. For the watchdog."""
        for worker in self._workers:
            worker.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL to every process group at once, without waiting. For the watchdog's last moment."""
        for worker in self._workers:
            worker.signal(signal.SIGKILL, group=True)

    def close(self, grace_s: float = 5.0) -> None:
        """Let the workers close within `grace_s`, all together, then kill what is left of their groups. Idempotent."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.ask_to_close(grace_s)
        deadline = time.monotonic() + grace_s
        for worker in workers:
            worker.close(deadline)

    def _spawn(self, rank: int) -> _Worker:
        label = f"{self._name}-{rank}"
        worker = _Worker(label, self._log_dir / f"{label}.log", {**os.environ, **self._env})
        start = (self._target, self._packed_kwargs, rank, list(sys.path))
        worker.send(frame(Kind.START, START_CALL_ID, pickle.dumps(start)))
        return worker


class _Worker:
    """One process, from its start to its reaping. Its thread starts the process and lives exactly as long: the kernel's
    parent-death signal follows the *thread* that forked."""

    def __init__(self, label: str, log: Path, env: Mapping[str, str]) -> None:
        self.label = label
        self.pid = -1
        self.ended = threading.Event()
        self._log = log
        self._env = env
        self._spawned = threading.Event()
        self._spawn_error: Exception | None = None
        self._lock = threading.Lock()  # guards _open and the step from running to ended
        self._open: dict[int, Future[Any]] = {START_CALL_ID: Future()}
        self._started = self._open[START_CALL_ID]
        self._call_ids = itertools.count(START_CALL_ID + 1)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()
        self._spawned.wait()
        if self._spawn_error is not None:
            raise self._spawn_error

    # ---- driver side, any thread

    def wait_started(self, deadline: float, timeout_s: float) -> None:
        try:
            self._started.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            if not self._started.done():
                text = (
                    f"{self.label} did not start within {timeout_s:g} s; its log {self._log} ends:\n{self._log_tail()}"
                )
                raise InfrastructureError("worker_start", text) from error
            raise InfrastructureError("worker_start", f"{self.label}: {error}") from error
        except RL360Error:
            raise
        except Exception as error:
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
            raise InfrastructureError("worker_start", text) from error

    def open_call(self, method: str, args: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        payload = pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL)
        future: Future[Any] = Future()
        with self._lock:
            if self.ended.is_set():
                raise self._died()
            call_id = next(self._call_ids)
            self._open[call_id] = future
        self.send(frame(Kind.CALL, call_id, payload))
        return call_id, future

    def cancel_call(self, call_id: int) -> None:
        with self._lock:
            known = self._open.pop(call_id, None) is not None
        if known:
            self.send(frame(Kind.CANCEL, call_id, b""))

    def send(self, data: bytes | None) -> None:
        self._outbox.put(data)

    def signal(self, signum: int, *, group: bool = False) -> None:
        """No-op once the process is reaped: its id may belong to someone else then."""
        with self._lock:
            if not self.ended.is_set():
                (os.killpg if group else os.kill)(self.pid, signum)

    def ask_to_close(self, grace_s: float) -> None:
        self.send(frame(Kind.CLOSE, 0, pickle.dumps(grace_s)))

    def close(self, deadline: float) -> None:
        if not self.ended.wait(max(0.0, deadline - time.monotonic())):
            self.signal(signal.SIGKILL, group=True)
        self._thread.join(REAP_S)

    # ---- the worker's own thread

    def _run(self) -> None:
        ours = None
        try:
            ours, theirs = socket.socketpair()
            with theirs, open(self._log, "ab") as log:
                command = [sys.executable, "-P", "-u", "-m", "rl360.engine.worker_main"]
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid()), self.label],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(self._env),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self.pid = process.pid
        except OSError as error:
            if ours is not None:
                ours.close()
            self._spawn_error = InfrastructureError("worker_start", f"{self.label}: {error}")
            self.ended.set()
            return
        finally:
            self._spawned.set()
        writer = threading.Thread(target=self._write, args=(ours,), name=f"{self.label}-writer", daemon=True)
        try:
            writer.start()
            self._read(ours)
        finally:
            self._reap(process, ours, writer)

    def _read(self, sock: socket.socket) -> None:
        """Resolve replies until the stream ends or the process does (a child of its own might hold the stream open)."""
        frames = FrameReader()
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        pidfd = _open_pidfd(self.pid)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if sock.fileno() in ready:
                    chunk = sock.recv(RECV_BYTES)
                    if not chunk:
                        return
                    for kind, call_id, payload in frames.feed(chunk):
                        self._resolve(kind, call_id, payload)
                elif pidfd in ready:
                    return
        except ConnectionError:
            return
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _resolve(self, kind: Kind, call_id: int, payload: bytes) -> None:
        with self._lock:
            future = self._open.pop(call_id, None)
        if future is None:
            return  # given up by its caller
        try:
            if kind is Kind.RESULT:
                future.set_result(pickle.loads(payload))
            else:
                future.set_exception(load_error(payload))
        except InvalidStateError:
            return  # cancelled by its caller just now
        except Exception as error:  # the result cannot be built on this side
            future.set_exception(RL360Error(f"{self.label}: result cannot be read: {error!r}"))

    def _reap(self, process: subprocess.Popen[bytes], sock: socket.socket, writer: threading.Thread) -> None:
        # The leader is left unreaped while its group is killed: until then nobody else can get its id.
        if not _exits_within(process.pid, REAP_S):
            os.killpg(process.pid, signal.SIGKILL)
            _exits_within(process.pid, REAP_S)
        with self._lock:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._returncode = process.wait()
            self.ended.set()
            lost, self._open = list(self._open.values()), {}
        for future in lost:
            with suppress(InvalidStateError):  # cancelled by its caller just now
                future.set_exception(self._died())
        sock.shutdown(socket.SHUT_RDWR)
        self.send(None)
        if writer.ident is not None:  # it was started
            writer.join()
        sock.close()

    def _write(self, sock: socket.socket) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                sock.sendall(data)
            except OSError:
                return  # the process is gone; _read sees it

    def _died(self) -> WorkerDied:
        code = self._returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = f"{self.label} (pid {self.pid}) ended, {how}; its log {self._log} ends:\n{self._log_tail()}"
        return WorkerDied("worker_died", text)

    def _log_tail(self) -> str:
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return "(no log)"


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # a kernel before 5.3, or a container that forbids it: the stream alone tells
        return None


def _exits_within(pid: int, seconds: float) -> bool:
    """Wait for a child without reaping it."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
