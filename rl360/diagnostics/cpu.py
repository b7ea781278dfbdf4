"""CPU seconds of this process and everything that descends from it.

In: the operating system's counters. Out: one number that only grows while no descendant is lost. A process that ended
counts once its parent has waited for it; one that was killed together with its parent does not.
"""

from __future__ import annotations

from contextlib import suppress


def process_tree_cpu_s() -> float:
    """User and system seconds: own, of living descendants, and of those that each of them has waited for."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
