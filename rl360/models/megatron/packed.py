"""One context rank's part of a packed micro-batch, and what its attention sees.

In: the packed stream of a micro-batch (sequences one after the other, padded as a whole). Out: `PackedInputs`, numpy
arrays of one context rank, and `PackedTensors`, the same on a device, with the rotary angles. Left to others: which
sequences make a micro-batch (the trainer), the attention itself (attention.py).

Context parallelism cuts the stream of N tokens into 2 x context chunks of equal length, wherever that cuts a sequence,
and gives chunks r and 2 x context - 1 - r to rank r: early chunks have little to look back at and late ones much, so
the pairs cost about the same. K and V are gathered, so a chunk's queries need the stream's keys from the start of the
sequence that their first one belongs to, up to their last one: a contiguous range, and causal order in it is
bottom-right aligned. No sequence is padded by itself.

Axes: N tokens of the stream, L tokens of this rank (N / context), Q queries of one chunk, S sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The attention of one chunk: queries `[query_start, query_stop)` of the rank's L tokens against keys
    `[key_start, key_stop)` of the N of the stream. Sequence s has queries cu_q[s]..cu_q[s+1] and keys
    cu_k[s]..cu_k[s+1], both counted from the start of their range; causal order is aligned at the last of each.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    cu_q: NDArray[np.int32]
    cu_k: NDArray[np.int32]
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedInputs:
    """What one context rank computes of one micro-batch."""

    num_tokens: int  # N
    context_size: int
    context_rank: int
    token_ids_L: NDArray[np.int64]
    positions_L: NDArray[np.int64]  # within the token's own sequence
    spans: tuple[Span, ...]  # one a chunk, in the order of L

    @classmethod
    def of(
        cls,
        token_ids_N: NDArray[np.int64],
        positions_N: NDArray[np.int64],
        lengths: Sequence[int],
        context_size: int = 1,
        context_rank: int = 0,
    ) -> PackedInputs:
        """`lengths` are those of the sequences, padding ones included: they add up to N."""
        num_tokens = token_ids_N.size
        assert sum(lengths) == num_tokens, f"lengths add up to {sum(lengths)}, there are {num_tokens} tokens"
        chunks = chunk_bounds(num_tokens, context_size, context_rank)
        rows = np.concatenate([np.arange(start, stop) for start, stop in chunks])
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        spans, offset = [], 0
        for start, stop in chunks:
            spans.append(_span(start, stop, bounds, offset))
            offset += stop - start
        return cls(num_tokens, context_size, context_rank, token_ids_N[rows], positions_N[rows], tuple(spans))

    def local_rows(self, rows_U: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which rows of the stream are this rank's, bool [U], and the places of those in L, int64."""
        here = np.zeros(rows_U.size, dtype=bool)
        places = np.zeros(rows_U.size, dtype=np.int64)
        offset = 0
        for start, stop in chunk_bounds(self.num_tokens, self.context_size, self.context_rank):
            inside = (rows_U >= start) & (rows_U < stop)
            here |= inside
            places[inside] = rows_U[inside] - start + offset
            offset += stop - start
        return here, places[here]


def chunk_bounds(num_tokens: int, context_size: int, context_rank: int) -> list[tuple[int, int]]:
    """The parts [start, stop) of the stream that a context rank holds, in the order in which it holds them."""
    if context_size == 1:
        return [(0, num_tokens)]
    assert num_tokens % (2 * context_size) == 0, f"{num_tokens} tokens do not split over {context_size} context ranks"
    each = num_tokens // (2 * context_size)
    return [(c * each, (c + 1) * each) for c in (context_rank, 2 * context_size - 1 - context_rank)]


def _span(start: int, stop: int, bounds: NDArray[np.int64], offset: int) -> Span:
    first = int(np.searchsorted(bounds, start, side="right")) - 1
    last = int(np.searchsorted(bounds, stop, side="left"))
    inner = bounds[first + 1 : last]
    key_start = int(bounds[first])
    cu_q = np.concatenate([[start], inner, [stop]]) - start
    cu_k = np.concatenate([[key_start], inner, [stop]]) - key_start
    return Span(
        query_start=offset,
        query_stop=offset + stop - start,
        key_start=key_start,
        key_stop=stop,
        cu_q=cu_q.astype(np.int32),
        cu_k=cu_k.astype(np.int32),
        max_q=int(np.diff(cu_q).max()),
        max_k=int(np.diff(cu_k).max()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSpan:
    """A `Span` whose offsets are int32 tensors on the device; `bounds` keeps them for the host."""

    bounds: Span
    cu_q: Tensor
    cu_k: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """A `PackedInputs` on a device: what the model's forward takes."""

    num_tokens: int
    context_size: int
    context_rank: int
    token_ids_L: Tensor  # int64
    positions_L: Tensor  # int64
    max_position: int
    spans: tuple[DeviceSpan, ...]

    @classmethod
    def of(cls, inputs: PackedInputs, device: torch.device) -> PackedTensors:
        """Upload, without waiting for the device (from pinned memory on CUDA)."""

        def tensor(array: NDArray[np.generic]) -> Tensor:
            return upload(array, device)

        return cls(
            inputs.num_tokens,
            inputs.context_size,
            inputs.context_rank,
            tensor(inputs.token_ids_L),
            tensor(inputs.positions_L),
            int(inputs.positions_L.max()),
            tuple(DeviceSpan(span, tensor(span.cu_q), tensor(span.cu_k)) for span in inputs.spans),
        )


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on the device; the copy to a GPU is asynchronous."""
    found = torch.from_numpy(np.ascontiguousarray(array))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
