"""One rank's part of one micro-batch, on its device.

In: a `MicroBatch` of this rank's data-parallel share, the same for all its tensor, context and pipeline ranks. Out:
`Work`: the tokens that this context rank computes and, for a last stage, what is predicted from them. Left to others:
dealing a batch out (shards.py), the model, the head.

Axes: U predicting positions and M trained tokens of this context rank; L its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl360.models.megatron.packed import PackedInputs, PackedTensors, upload
from rl360.trainers.megatron.head import HeadPredictions
from rl360.trainers.packing import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What a last stage needs of a micro-batch."""

    rows_U: Tensor  # index into L
    predictions: HeadPredictions
    behaviour_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    sequences_M: Tensor  # int64, which of the micro-batch's sequences
    places_M: Tensor  # int64, which of their sequence's trained tokens
    num_sequences: int  # of the whole micro-batch
    tokens_M: NDArray[np.int64]  # which of the whole micro-batch's trained tokens these are
    num_tokens: int  # trained tokens of the whole micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    index: int  # of the micro-batch in its step
    packed: PackedTensors
    targets: Targets | None  # None: not a last stage

    @classmethod
    def of(
        cls,
        index: int,
        micro: MicroBatch,
        device: torch.device,
        *,
        context_size: int,
        context_rank: int,
        with_targets: bool,
    ) -> Work:
        """Cut out this context rank's part and upload it once, without waiting for the device.

        The micro-batch must have no shared prefixes, and a length that the context ranks can share.
        """
        assert all(tree.prefix_length == 0 for tree in micro.trees), "ranks compute whole sequences"
        lengths = [length for tree in micro.trees for length in tree.branch_lengths]
        inputs = PackedInputs.of(micro.token_ids_N, micro.positions_N, lengths, context_size, context_rank)
        targets = _targets(micro, inputs, device) if with_targets else None
        return cls(index, PackedTensors.of(inputs, device), targets)


def _targets(micro: MicroBatch, inputs: PackedInputs, device: torch.device) -> Targets:
    here_U, rows_U = inputs.local_rows(micro.rows_U)
    tokens_M = np.flatnonzero(here_U[micro.slots_M])
    slots_M = (np.cumsum(here_U) - 1)[micro.slots_M[tokens_M]]
    return Targets(
        rows_U=upload(rows_U, device),
        predictions=HeadPredictions.of(micro.temperatures_U[here_U], slots_M, micro.targets_M[tokens_M], device),
        behaviour_M=upload(micro.behaviour_M[tokens_M], device),
        advantages_M=upload(micro.advantages_M[tokens_M], device),
        weights_M=upload(micro.weights_M[tokens_M], device),
        sequences_M=upload(micro.sequences_M[tokens_M], device),
        places_M=upload(micro.places_M[tokens_M], device),
        num_sequences=int(micro.sequences_M.max(initial=-1)) + 1,
        tokens_M=tokens_M,
        num_tokens=micro.slots_M.size,
    )
