"""One owner of "no progress": says which stage stands still and for whom it waits, and ends the run.

In: stages as they are entered, and a word each time that something moved. Out: nothing, until nothing has moved for
`no_progress_s`: then a message, the stacks of all threads, and an exit with code 75, so that a scheduler frees the
nodes. Left to others: deadlines of single calls, which end long before this one.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: resuming may help
CALLBACK_S = 10.0  # for describe(), on_stall() and kill_children() each: they may need what is stuck
BACKSTOP_FACTOR = 1.5  # of no_progress_s; then the interpreter itself is stuck
BACKSTOP_CALLBACKS = 8  # times CALLBACK_S besides: all that is tried before the end
STDERR = 2  # its descriptor: sys.stderr may be anything


class Watchdog:
    """protocols.Watchdog as a thread. Close it, or use it as a context manager.

    Args:
        no_progress_s: seconds without a stage change or `progress()`; 0: never ends the run.
        describe: one line on whom the current stage waits for.
        log_dir: `watchdog.log` there gets the message and the stacks, standard error gets the message.
        kill_children: ends the run's child processes.
        on_stall: told the message before the end, to write a summary, say.
        end: ends the process; replaced in tests.
    """

    def __init__(
        self,
        no_progress_s: float,
        describe: Callable[[], str],
        *,
        log_dir: Path,
        kill_children: Callable[[], object] = lambda: None,
        on_stall: Callable[[str], object] = lambda message: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._no_progress_s = no_progress_s
        self._describe = describe
        self._log_path = Path(log_dir) / "watchdog.log"
        self._kill_children = kill_children
        self._on_stall = on_stall
        self._end = end
        self._lock = threading.Lock()
        self._stages: list[str] = []
        self._moved_at = time.monotonic()
        self._paused = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self.progress()
        if self._no_progress_s > 0:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs now; stages nest. Entering and leaving is progress."""
        with self._lock:
            self._stages.append(name)
            self._moved_at = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._stages.remove(name)
                self._moved_at = time.monotonic()

    def progress(self) -> None:
        with self._lock:
            self._moved_at = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still on purpose, as a debugger or an upload without news does. Leaving is progress."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                self._moved_at = time.monotonic()

    # ---- the watchdog's own thread: nothing that fails or hangs here may keep the end from coming

    def _watch(self) -> None:
        tick_s = min(1.0, self._no_progress_s / 10)
        with ExitStack() as stack:
            stderr = _stderr(stack)
            file: TextIO | int = stderr
            try:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self._log_path, "a", encoding="utf-8"))
            except OSError as error:
                said = f"watchdog: {error}; stacks would go to standard error"
                _within(CALLBACK_S, lambda: log.warning("%s", said))
            stack.callback(faulthandler.cancel_dump_traceback_later)
            while not self._closed.wait(tick_s):
                # A thread stuck in C code with the interpreter lock stops this one too. The C timer behind it does not
                # need the lock; it is set anew at each tick, so it fires only when ticks have ended.
                with suppress(RuntimeError):  # no thread can be started just now
                    faulthandler.dump_traceback_later(
                        self._no_progress_s * BACKSTOP_FACTOR + BACKSTOP_CALLBACKS * CALLBACK_S, exit=True, file=file
                    )
                with self._lock:
                    stage = " > ".join(self._stages) or "between stages"
                    still_s = 0.0 if self._paused else time.monotonic() - self._moved_at
                if still_s > self._no_progress_s:
                    try:
                        self._stall(stage, still_s, file, stderr)
                    finally:
                        self._end(EXIT_CODE)
                    return

    def _stall(self, stage: str, still_s: float, file: TextIO | int, stderr: int) -> None:
        waits_for = _within(CALLBACK_S, self._describe) or "no answer to whom it waits for"
        message = (
            f"no progress for {still_s:.0f} s (limit {self._no_progress_s:g} s) in stage {stage}; "
            f"waiting for: {waits_for}; stacks in {self._log_path}"
        )

        def write_down() -> bool:
            if isinstance(file, int):
                return False
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            file.flush()
            return True

        # A full disk, a terminal that is gone, a pipe that nobody reads: each can be what the run hangs in.
        stacks_to = file if _within(CALLBACK_S, write_down) else stderr
        _within(CALLBACK_S, lambda: faulthandler.dump_traceback(file=stacks_to, all_threads=True))
        _within(CALLBACK_S, lambda: print(f"rl360: {message}", file=sys.stderr, flush=True))
        _within(CALLBACK_S, lambda: log.error(message))
        _within(CALLBACK_S, lambda: self._on_stall(message))
        _within(CALLBACK_S, self._kill_children)
        _within(CALLBACK_S, sys.stdout.flush)


def _stderr(stack: ExitStack) -> int:
    """Standard error, opened once more where that is possible: without waiting for a reader. Stacks are written with
    the interpreter's lock, and by the timer without one, so a pipe that nobody empties would hold the end itself."""
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        again = os.open(f"/proc/self/fd/{STDERR}", flags)
        stack.callback(os.close, again)
        return again
    return STDERR


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result, or None when it raises or takes longer: the end must come whatever it needs."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception:
            log.exception("watchdog: a callback failed")

    thread = threading.Thread(target=run, name="watchdog-callback", daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(seconds)
    return result[0] if result else None
