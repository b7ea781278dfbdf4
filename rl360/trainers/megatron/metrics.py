"""Metrics of a step: sums on each rank, over ranks, and means over the optimizer steps of one batch.

In: metric sums of parts of micro-batches, left on the device. Out: plain numbers under the names of the torch trainer.
Names that end in `_max` are maxima. What is summed is the step's (training.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from rl360.protocols import Algorithm
from rl360.trainers.mismatch import mismatch_sums

ENTROPY = "train/entropy"
LOSS = "train/loss"


@dataclass(slots=True)
class MetricSums:
    """Metrics of one optimizer step on this rank, left on the device until the step is over."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, part: Mapping[str, Tensor]) -> None:
        for name, value in part.items():
            if name not in self.values:
                self.values[name] = value
            elif name.endswith("_max"):
                self.values[name] = torch.maximum(self.values[name], value)
            else:
                self.values[name] = self.values[name] + value

    def over_ranks(self, names: SequenceABC[str], device: torch.device) -> dict[str, float]:
        """Sums and maxima over data and context ranks, in one exchange each: all of them must call it, with the same
        names. A name that this rank has not counts as nothing."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        found: dict[str, float] = {}
        for operation, absent, of_kind in (
            (distributed.ReduceOp.SUM, 0.0, [name for name in names if not name.endswith("_max")]),
            (distributed.ReduceOp.MAX, float("-inf"), [name for name in names if name.endswith("_max")]),
        ):
            if not of_kind:
                continue
            nothing = torch.tensor(absent, dtype=torch.float64, device=device)
            values = torch.stack([self.values.get(name, nothing).double() for name in of_kind])
            distributed.all_reduce(values, op=operation, group=group)
            found |= dict(zip(of_kind, values.tolist(), strict=True))
        return found


def metric_names(algorithm: Algorithm, device: torch.device) -> list[str]:
    """Names that the algorithm's loss reports, also for a rank that has no token in a step."""
    one = torch.zeros(1, device=device)
    correction = (one,) if algorithm.needs_sequence_ratios else ()
    _, metrics = algorithm.loss(one, one, one, one, one, one if algorithm.needs_reference else None, *correction)
    mismatch = mismatch_sums(one, one, one, torch.zeros(1, dtype=torch.int64, device=device))
    return [LOSS, ENTROPY, *metrics, *mismatch]


def over_updates(per_update: SequenceABC[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one batch, maxima of what ends in `_max`, the last learning rate."""
    names = per_update[0].keys()
    found = {
        name: max(u[name] for u in per_update)
        if name.endswith("_max")
        else sum(u[name] for u in per_update) / len(per_update)
        for name in names
    }
    return {**found, "train/lr": per_update[-1]["train/lr"]}
