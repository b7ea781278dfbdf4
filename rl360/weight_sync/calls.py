"""The same call to every engine at once, without one that hangs holding up the others.

In: engines, a call. Out: which failed, and why. The clock of those that are still silent starts when the first of them
has answered: all do the same work, so whoever takes much longer hangs. Where nobody answers, what the call has taken
before is all to compare with, or else its own timeout ends it. What a failure means is left to rl360.weight_sync.sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rl360.errors import EngineError
from rl360.weight_sync.engine import WeightEngine

Failures = dict[str, str]  # engine URL -> what went wrong
SLOW = 3.0  # times the patience, for calls that move or read all weights: the first of them may also compile a kernel
TIMES_THE_FIRST = 3.0  # however slow a call is: so many times what the first to answer took
# Of failures: the process, or the way to it, and not the weights.
RESTART_HELPS = ("engine_refused", "engine_timeout", "engine_status_5", "host_io")


async def each(
    engines: Iterable[WeightEngine],
    call: Callable[[WeightEngine], Awaitable[object]],
    slow: bool = False,
    usual_s: float | None = None,
) -> Failures:
    """What failed, by URL. An engine that is silent for its `straggler_s` longer than the first that succeeded, and for
    three times as long as that took, is given up as `engine_timeout`.

    Args:
        slow: the call moves or reads all weights.
        usual_s: at most so much has the same call taken before: the clock starts no sooner, and also where nobody
            succeeds. None: unknown.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = {asyncio.create_task(_one(engine, call)): engine for engine in engines}
    failures: Failures = {}
    waiting = set(tasks)
    first_s: float | None = None
    try:
        while waiting:
            known_s = max((s for s in (first_s, usual_s) if s is not None), default=None)
            patience_s = _patience(tasks[next(iter(waiting))].straggler_s, known_s, slow)
            left_s = None if patience_s is None else max(0.0, began + patience_s - loop.time())
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                if (problem := task.result()) is not None:
                    failures[tasks[task].url] = problem
                elif first_s is None:
                    first_s = loop.time() - began
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    for task in waiting:
        url = tasks[task].url
        known = (
            f"others took {usual_s:.1f} s at most" if first_s is None else f"another engine's came in {first_s:.1f} s"
        )
        problem = f"no answer in {loop.time() - began:.1f} s, {known}"
        failures[url] = f"engine_timeout: {url}: {problem}"
    return failures


async def _one(engine: WeightEngine, call: Callable[[WeightEngine], Awaitable[object]]) -> str | None:
    try:
        await call(engine)
    except EngineError as error:
        return str(error)
    return None


def _patience(straggler_s: float | None, known_s: float | None, slow: bool) -> float | None:
    """Seconds from the start of a call; None: as long as the call's own timeout allows."""
    if straggler_s is None or known_s is None:
        return None
    return known_s + max(straggler_s * (SLOW if slow else 1.0), TIMES_THE_FIRST * known_s)


def restart_helps(failure: str) -> bool:
    """Whether an engine failed for itself or was not reached: a new one may do better. Else it answered, wrongly."""
    return failure.startswith(RESTART_HELPS)
