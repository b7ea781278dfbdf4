"""Random weights from a seed: the same numbers for both trainers, whatever their layout.

In: names and shapes, a seed, the device that the weights are for. Out: whole fp32 tensors, one after the other. Left to
others: which of it a rank keeps, and the dtype (rl360.models.loading, rl360.models.megatron.model).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

# A host draws some 200 million numbers a second, on every rank all of them: Qwen3-8B's would take it the better part of
# a minute, those of the tests' models no time at all, and there a GPU shall begin as a CPU does.
MAX_DRAWN_ON_HOST = 2**27
# By one kernel. In torch's a thread draws four numbers; up to 2^18 of them all threads run at once on any GPU of 32
# multiprocessors or more, so what is drawn does not depend on how many there are.
DRAWN_AT_ONCE = 2**18

log = logging.getLogger(__name__)


def drawing_device(count: int, device: torch.device) -> torch.device:
    """Who draws `count` numbers for `device`: the host, or with more than MAX_DRAWN_ON_HOST the device itself."""
    return torch.device("cpu") if count <= MAX_DRAWN_ON_HOST else device


def drawn(
    shapes: Mapping[str, Sequence[int]], std: float, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """One after the other, fp32 tensors of these names and shapes, normal(0, std).

    Few numbers (`drawing_device`) are the same ones for every device. More are drawn on the device, and a GPU draws
    others than a host (Philox; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), but every GPU the
    same ones. The log says who drew.
    """
    count = sum(math.prod(shape) for shape in shapes.values())
    device = drawing_device(count, device)
    log.info("random weights: %d numbers drawn on the %s, seed %d", count, device.type, seed)
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        whole = torch.empty(tuple(shape), dtype=torch.float32, device=device)
        at_once = DRAWN_AT_ONCE if device.type == "cuda" else whole.numel()
        for part in whole.view(-1).split(at_once):
            part.normal_(0.0, std, generator=generator)
        yield name, whole
