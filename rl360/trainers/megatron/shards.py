"""From a global batch to every data-parallel rank's micro-batches.

In: the sequences of a `Batch`, a token budget, the layout's multiples. Out: for each rank the same number of
`MicroBatch`es, padded, with fillers where a rank has less work. Left to others: context parallelism's cut of a
micro-batch, tensors, the model.

Token weights hold the global normaliser, so the sum of all gradients over ranks and micro-batches is the gradient of
the batch, however it is cut here. What matters is time: a step lasts as long as its slowest rank. Sequences are dealt
to ranks by cost, the most expensive first and each to the rank with the least so far (R. Graham, "Bounds on
multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17(2), 1969), then packed within the rank.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rl360.trainers.packing import MicroBatch, Tree, pack
from rl360.types import Batch, Sequence

if TYPE_CHECKING:
    from rl360.models.decoder import DecoderConfig

# Sequence length at which attention costs as much as everything else, of an 8B (Qwen3-8B: 47k). Smaller models reach it
# earlier: `equal_cost_tokens` gives a model's own.
EQUAL_COST_TOKENS = 47_000.0

PADDING_TOKEN = 0  # any id that the embedding has: nothing is predicted from padding, and no sequence attends to it


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    sequence: Sequence
    num_inputs: int  # tokens up to, not including, the last trained one
    cost: float


def equal_cost_tokens(config: DecoderConfig) -> float:
    """Return the sequence length at which causal attention and the layers' matrix products take as many FLOPs.

    A token of a sequence of n tokens costs a layer 2 FLOPs a weight, and 4 a head value and earlier token, of which
    there are n / 2 on average.
    """
    query = config.num_heads * config.head_dim
    projections = config.hidden_size * (2 * query + 2 * config.num_kv_heads * config.head_dim)
    return (projections + 3 * config.hidden_size * config.intermediate_size) / query


def sequence_cost(num_inputs: int, equal_cost: float = EQUAL_COST_TOKENS) -> float:
    """Cost of a sequence in tokens of a short one: n + n^2 / equal_cost (causal attention is quadratic)."""
    return num_inputs * (1.0 + num_inputs / equal_cost)


def shard_batch(
    batch: Batch,
    *,
    data_parallel: int,
    max_tokens: int,
    pad_multiple: int = 1,
    count_multiple: int = 1,
    equal_cost: float = EQUAL_COST_TOKENS,
) -> list[list[MicroBatch]]:
    """Deal a batch out to ranks and pack each rank's share.

    Every sequence is in exactly one micro-batch, whole; prompts are not shared. Padding is a last branch from which
    nothing is predicted; a filler is only that. Rank costs differ by at most the cost of the largest sequence. The
    result depends on nothing but the arguments.

    Args:
        max_tokens: of one micro-batch with its padding, over all of its context-parallel ranks. A longer sequence gets
            a micro-batch of its own.
        pad_multiple: of the tokens of a micro-batch.
        count_multiple: of the micro-batches of a rank (the pipeline's size where its interleaved schedule asks).
        equal_cost: see `equal_cost_tokens`.

    Returns:
        [data-parallel rank][i], as many for each rank, those with most tokens first: what one leaves in the GPU
        allocator's cache then holds the next, where a slightly longer one would have a second set of blocks beside it.

    Raises:
        ValueError: no sequences; one without a trained token that something precedes; a count or multiple below 1;
            `max_tokens` below `pad_multiple`.
    """
    if not batch.sequences:
        raise ValueError("the batch has no sequences; expected at least one trained token (skip the step instead)")
    if min(data_parallel, pad_multiple, count_multiple) < 1:
        raise ValueError(
            f"data_parallel {data_parallel}, pad_multiple {pad_multiple}, count_multiple {count_multiple}: "
            "expected at least 1 each"
        )
    capacity = max_tokens // pad_multiple * pad_multiple
    if capacity < 1:
        raise ValueError(f"max_tokens {max_tokens}: below pad_multiple {pad_multiple}, so not even padding fits")
    items = [_item(sequence, equal_cost) for sequence in batch.sequences]
    ranks = _dealt(items, data_parallel)
    packed = [_first_fit(rank, capacity) for rank in ranks]
    count = -(-max(map(len, packed)) // count_multiple) * count_multiple
    return [
        [_micro_batch(bin_, pad_multiple) for bin_ in _longest_first(_spread(rank, tight, count, capacity))]
        for rank, tight in zip(ranks, packed, strict=True)
    ]


def _item(sequence: Sequence, equal_cost: float) -> _Item:
    trained = np.flatnonzero(sequence.loss_mask_T)
    if not trained.size or trained[0] == 0:
        raise ValueError(f"attempt {sequence.attempt_id}: a sequence needs a trained token that something precedes")
    num_inputs = int(trained[-1])
    return _Item(sequence, num_inputs, sequence_cost(num_inputs, equal_cost))


def _by_cost(items: SequenceABC[_Item]) -> list[_Item]:
    return sorted(items, key=lambda item: -item.cost)  # stable: equal costs stay in the batch's order


def _dealt(items: SequenceABC[_Item], num_ranks: int) -> list[list[_Item]]:
    ranks: list[list[_Item]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for item in _by_cost(items):
        least = min(range(num_ranks), key=costs.__getitem__)
        ranks[least].append(item)
        costs[least] += item.cost
    return ranks


def _first_fit(items: SequenceABC[_Item], capacity: int) -> list[list[_Item]]:
    """First-fit decreasing; its bins are the fewest that this module aims for."""
    bins: list[list[_Item]] = []
    used: list[int] = []
    for item in _by_cost(items):
        fitting = next((i for i, tokens in enumerate(used) if tokens + item.num_inputs <= capacity), None)
        if fitting is None:
            bins.append([])
            used.append(0)
            fitting = len(bins) - 1
        bins[fitting].append(item)
        used[fitting] += item.num_inputs
    return bins


def _spread(items: SequenceABC[_Item], tight: list[list[_Item]], count: int, capacity: int) -> list[list[_Item]]:
    """`count` bins of about the same cost: the stages of a pipeline wait for the slowest micro-batch.

    Where the budget does not allow it, the tight bins and empty ones.
    """
    bins: list[list[_Item]] = [[] for _ in range(count)]
    used, costs = [0] * count, [0.0] * count
    for item in _by_cost(items):
        fitting = [i for i in range(count) if not bins[i] or used[i] + item.num_inputs <= capacity]
        if not fitting:
            return tight + [[] for _ in range(count - len(tight))]
        least = min(fitting, key=costs.__getitem__)
        bins[least].append(item)
        used[least] += item.num_inputs
        costs[least] += item.cost
    return bins


def _longest_first(bins: list[list[_Item]]) -> list[list[_Item]]:
    return sorted(bins, key=lambda items: -sum(item.num_inputs for item in items))


def _micro_batch(items: SequenceABC[_Item], pad_multiple: int) -> MicroBatch:
    if not items:
        return _padded(_NOTHING, pad_multiple)
    total = sum(item.num_inputs for item in items)
    (micro,) = pack([item.sequence for item in items], max_tokens=total, share_prompts=False)
    return _padded(micro, -total % pad_multiple)


def _padded(micro: MicroBatch, num_tokens: int) -> MicroBatch:
    if num_tokens == 0:
        return micro
    branches = tuple(length for tree in micro.trees for length in tree.branch_lengths)
    return replace(
        micro,
        token_ids_N=np.append(micro.token_ids_N, np.full(num_tokens, PADDING_TOKEN)),
        positions_N=np.append(micro.positions_N, np.arange(num_tokens)),
        trees=(Tree(0, (*branches, num_tokens)),),
    )


_NOTHING = MicroBatch(
    token_ids_N=np.zeros(0, np.int64),
    positions_N=np.zeros(0, np.int64),
    trees=(),
    rows_U=np.zeros(0, np.int64),
    temperatures_U=np.zeros(0, np.float32),
    slots_M=np.zeros(0, np.int64),
    targets_M=np.zeros(0, np.int64),
    behaviour_M=np.zeros(0, np.float32),
    advantages_M=np.zeros(0, np.float32),
    weights_M=np.zeros(0, np.float32),
    sequences_M=np.zeros(0, np.int64),
    places_M=np.zeros(0, np.int64),
)
