"""Threads of a synchronisation: their results come, and nobody waits for one that hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from rl360.weight_sync.threads import in_thread


async def test_results_and_errors_come_back() -> None:
    assert await in_thread(lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(KeyError, match="nothing"):
        await in_thread(lambda: {}["nothing"])


async def test_one_that_nobody_waits_for_any_more_ends_unheard() -> None:
    go, ended = threading.Event(), threading.Event()

    def late() -> None:
        go.wait(60)
        ended.set()

    task = asyncio.create_task(in_thread(late))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, 60)


INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import DiskTransport

class Hangs:
    version = 0
    def publish(self, folder):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)

sync = FleetSync(FixedSet(["http://127.0.0.1:1"]), DiskTransport(Path("w")), WeightEngine)
def interrupt(signum, frame): raise KeyboardInterrupt("for the second time")
signal.signal(signal.SIGINT, interrupt)
try:
    sync.sync(Hangs(), 1)
except KeyboardInterrupt as error:
    sync.close()
    print(error)
"""


def test_an_interrupted_synchronisation_ends_at_once_though_the_trainer_hangs() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, timeout=200
    )
    assert done.stdout == b"for the second time\n", done.stderr
    assert time.monotonic() - began < 100  # asyncio's own threads are waited for 300 s, and at the end for good
