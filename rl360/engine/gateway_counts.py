"""What the gateway counted in one iteration, from counts that only grow.

In: the gateway's counts since it started. Out: scalars `gateway/<name>`. Where they have become smaller, whoever counts
began at 0 again: what it says then is all of this iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rl360.errors import RL360Error

log = logging.getLogger(__name__)

GAUGE = "_now"  # names that end so say what is, not what has happened


class GatewayCounts:
    """`ask` may raise RL360Error or TimeoutError: then there are no counts this time, and the next row has both."""

    def __init__(self, ask: Callable[[], Mapping[str, int]]) -> None:
        self._ask = ask
        self._before: Mapping[str, int] = {}

    def __call__(self) -> dict[str, float]:
        try:
            now = self._ask()
        except (RL360Error, TimeoutError) as error:
            log.warning("the gateway's counts are missing from this row: %s", error)
            return {}
        found = {}
        for name, value in now.items():
            before = 0 if name.endswith(GAUGE) else self._before.get(name, 0)
            found[f"gateway/{name}"] = float(value - before if value >= before else value)
        self._before = dict(now)
        return found
