"""SIGTERM as an interruption, for as long as nobody handles it better; and where a handler may run at all.

In: a block of code. Out: a SIGTERM in it raises `Terminated`, so that files are closed and a message is said, where
Python would end without a word. A run that has begun handles signals itself (rl360.engine.run).

A handler needs a stack. oneDNN's kernels before 3.11.2 (PyTorch 2.11 has 3.10.2) keep a heap address in the stack
pointer, and a handler that began there overwrote the heap: a Ctrl-C in a step on a CPU then ended the process with
"corrupted size vs. prev_size" (uxlfoundation/oneDNN, issue 4845). So the main thread's handlers get a stack of their
own (`use_a_signal_stack`), and threads that compute leave signals to it (`leave_signals_to_the_main_thread`).
"""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Those that a handler of ours or of Python's may be asked for.
HANDLED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM})
STDERR = 2


def use_a_signal_stack() -> None:
    """From the main thread, at the start of a process. CPython runs every handler on a thread's alternate stack where
    there is one, and `faulthandler` makes one; besides, a crash in native code then says in which line of Python."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=STDERR)


def leave_signals_to_the_main_thread() -> None:
    """From any other thread that computes; the threads that it starts inherit that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


@contextmanager
def signals_later() -> Iterator[None]:
    """A signal waits for the end of the block; threads that are started in it never get one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM; ends everything that Ctrl-C would end."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise Terminated in the block on SIGTERM. Threads other than the main one have no say in signals: nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated("SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
