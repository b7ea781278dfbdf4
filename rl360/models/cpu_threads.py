"""PyTorch's threads on a CPU.

In: how many. Out: a pool of that size for the calling thread, whose threads take no signals (why: rl360.interrupts).
"""

from __future__ import annotations

import os

import torch

from rl360.interrupts import signals_later

GRAIN = 32768  # elements from which PyTorch gives a further thread work (at::internal::GRAIN_SIZE)


def use_cpu_threads(num_threads: int | None) -> None:
    """Of the calling thread's own products from here on.

    Args:
        num_threads: None or 0: as many as the process may use cores.
    """
    num_threads = num_threads or len(os.sched_getaffinity(0))
    with signals_later():
        torch.set_num_threads(num_threads)
        torch.zeros(2 * num_threads * GRAIN).add_(1.0)  # the pool begins with the first work that is for all of it
