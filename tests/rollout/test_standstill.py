"""A process that stood still, by clocks of the test's own and by a real one that is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl360.rollout.standstill import Standstill


class Clocks:
    def __init__(self) -> None:
        self.now = 100.0
        self.computed = 5.0

    def watch(self) -> Standstill:
        return Standstill(lambda: self.now, lambda: self.computed)

    def go_on(self, seconds: float, computing: float = 0.0) -> None:
        self.now += seconds
        self.computed += computing


def test_seconds_in_which_nothing_ran():
    clocks = Clocks()
    watch = clocks.watch()
    clocks.go_on(1.2)
    watch.look()
    assert watch.seconds_since(100.0) == 0.0
    clocks.go_on(30.0, computing=0.1)
    assert watch.seconds_since(100.0) == pytest.approx(30.0)
    assert watch.seconds_since(121.2) == pytest.approx(10.0)  # what began in the middle of it
    assert watch.seconds_since(131.3) == 0.0
    clocks.go_on(8.0)
    assert watch.seconds_since(100.0) == pytest.approx(38.0)


def test_one_that_computed_was_busy():
    clocks = Clocks()
    watch = clocks.watch()
    clocks.go_on(30.0, computing=20.0)
    assert watch.seconds_since(0.0) == 0.0


def test_a_stopped_process_knows_it():
    code = (
        "import sys, time\n"
        "from rl360.rollout import standstill\n"
        "standstill.LOOK_S, standstill.LEAST_S = 0.1, 0.5\n"
        "watch = standstill.Standstill(); watch.begin(); began = time.monotonic()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(watch.seconds_since(began))\n"
    )
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("go\n", timeout=20)
    assert 1.2 < float(said) < 15.0
