"""One worker process: `python -m rl360.engine.worker_main <socket fd> <driver pid> <name>`, started by workers.py.

In: frames on an inherited socket (wire.py): what to build, then calls. Out: one result or error per call; log lines
on stdout and stderr, which the driver has pointed to a file. Left to others: what the class named in START does.

The process ends when it is told to, when the socket closes, or when the driver dies. Until then it outlives Ctrl-C and
SIGTERM: those reach every process of a job, and the driver decides what they mean. SIGUSR1 writes the stacks of all
threads and asyncio tasks to the log.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import inspect
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from typing import Any

from rl360.engine.wire import START_CALL_ID, FrameReader, Kind, dump_error, frame
from rl360.interrupts import use_a_signal_stack

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PARENT_DIED = signal.SIGRTMIN + 1  # nobody else sends it, so it needs no guess about who meant what
ORPHAN_GRACE_S = 5.0  # how long close() may take once the driver is gone
RECV_BYTES = 1 << 20


def _ignore(signum: int, stack: object) -> None:
    """A handler rather than SIG_IGN: an ignored signal stays ignored in the programs that a worker starts."""


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


class WorkerProcess:
    """Runs one object's methods for the driver at the other end of the socket, many calls at once."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._worker: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._grace_s = ORPHAN_GRACE_S

    async def run(self) -> None:
        """Serve until CLOSE, end of stream or the driver's death; then close the object."""
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._loop.add_signal_handler(PARENT_DIED, self._stopped.set)
        self._loop.add_signal_handler(signal.SIGUSR1, self._print_tasks)
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
        writer = threading.Thread(target=self._write, name="driver-writer", daemon=True)
        writer.start()
        threading.Thread(target=self._read, name="driver-reader", daemon=True).start()
        await self._stopped.wait()
        # Nothing may keep the process: whatever close() does, the group is gone after the grace.
        deadline = threading.Timer(self._grace_s, _end_group)
        deadline.daemon = True
        deadline.start()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if hasattr(self._worker, "close"):
            try:
                await _finish(self._worker.close())
            except Exception:
                logging.exception("%s: close failed", self._name)
        self._outbox.put(None)
        await asyncio.to_thread(writer.join)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while chunk := self._sock.recv(RECV_BYTES):
                for kind, call_id, payload in frames.feed(chunk):
                    self._loop.call_soon_threadsafe(self._handle, kind, call_id, payload)
        except OSError:
            logging.info("%s: the driver's socket broke", self._name)
        self._loop.call_soon_threadsafe(self._stopped.set)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._sock.sendall(data)
            except OSError:
                return  # the driver is gone; the reader sees it too

    def _handle(self, kind: Kind, call_id: int, payload: bytes) -> None:
        if kind is Kind.CLOSE:
            self._grace_s = pickle.loads(payload)
            self._stopped.set()
        elif kind is Kind.CANCEL:
            if task := self._tasks.get(call_id):
                task.cancel()
        else:
            serve = self._start(payload) if kind is Kind.START else self._call(payload)
            task = self._loop.create_task(self._answer(call_id, serve))
            self._tasks[call_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(call_id, None))

    async def _answer(self, call_id: int, serve: Any) -> None:
        try:
            reply = frame(Kind.RESULT, call_id, pickle.dumps(await serve, protocol=pickle.HIGHEST_PROTOCOL))
        except (Exception, asyncio.CancelledError) as error:
            reply = frame(Kind.ERROR, call_id, dump_error(error, self._name))
            if call_id == START_CALL_ID:
                logging.exception("%s: start failed", self._name)
        self._outbox.put(reply)

    async def _start(self, payload: bytes) -> None:
        target, packed_kwargs, rank, sys_path = pickle.loads(payload)
        sys.path[:] = sys_path
        kwargs = pickle.loads(packed_kwargs)  # after the path is set: it may name classes found only there
        module_name, _, class_name = target.partition(":")
        self._worker = getattr(importlib.import_module(module_name), class_name)(**kwargs, rank=rank)
        if hasattr(self._worker, "start"):
            await _finish(self._worker.start())

    async def _call(self, payload: bytes) -> Any:
        method, args = pickle.loads(payload)
        return await _finish(getattr(self._worker, method)(*args))

    def _print_tasks(self) -> None:
        for task in asyncio.all_tasks():
            print(f"{task.get_name()}:\n{waiting_at(task)}", file=sys.stderr)


def waiting_at(task: asyncio.Task[Any]) -> str:
    """Where a suspended task waits, outermost call first. (Task.print_stack shows the outermost alone.)"""
    lines, awaited = [], task.get_coro()
    while awaited is not None:
        stack = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if stack is None:
            break
        lines.append(f'  File "{stack.f_code.co_filename}", line {stack.f_lineno}, in {stack.f_code.co_name}')
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "\n".join(lines)


async def _finish(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def main(argv: list[str]) -> None:
    fd, driver_pid, name = int(argv[0]), int(argv[1]), argv[2]
    # Its default action ends the process, which is right until the loop runs.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(PARENT_DIED), 0, 0, 0)
    if os.getppid() != driver_pid:
        return  # it died before the kernel knew whom to tell
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGTERM, _ignore)
    use_a_signal_stack()
    os.set_inheritable(fd, False)  # a program that the worker starts must not keep the driver's stream open
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=fd) as sock:
        asyncio.run(WorkerProcess(sock, name).run())


if __name__ == "__main__":
    main(sys.argv[1:])
