"""SIGTERM as an interruption, for as long as nobody handles it better.

In: a block of code. Out: a SIGTERM in it raises `Terminated`, so that files are closed and a message is said, where
Python would end without a word. A run that has begun handles signals itself (rl360.engine.run).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
