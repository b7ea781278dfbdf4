"""Whether this process stood still: stopped, or kept from computing by a machine that was at its end.

In: the clocks. Out: for how many seconds of a given time nothing ran here. Left to others: what follows from it
(trial_worker.py, failures.py).

Timers go on while a process stands still, and run out the moment that it goes on: what they then end has had no chance
to be in time. A thread looks at the clock once a second. When much more has passed since its last look, and the process
has not computed meanwhile, it stood still; one that computed was busy, which an agent's own code can make it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

LOOK_S = 1.0
LEAST_S = 5.0  # beyond a look's own second: less is a busy machine, and decides no timer
BUSY_SHARE = 0.5  # of the time between two looks, computed here: then it was busy
MOST_KEPT = 1000


class Standstill:
    """`begin` once; any thread may ask. The clocks are those of `time`, or a test's."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, computed: Callable[[], float] = time.process_time
    ) -> None:
        self._clock, self._computed = clock, computed
        self._lock = threading.Lock()
        self._last = clock(), computed()
        self._found: deque[tuple[float, float]] = deque(maxlen=MOST_KEPT)  # (end, seconds)
        self._ended = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._watch, name="standstill", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def seconds_since(self, began: float) -> float:
        """How long of the time since `began` (of the clock) this process stood still."""
        self.look()
        with self._lock:
            return sum(min(seconds, end - began) for end, seconds in self._found if end > began)

    def look(self) -> None:
        with self._lock:
            (then, computed_then), now, computed = self._last, self._clock(), self._computed()
            self._last = now, computed
            seconds = now - then
            if seconds >= LOOK_S + LEAST_S and computed - computed_then < BUSY_SHARE * seconds:
                self._found.append((now, seconds))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()
