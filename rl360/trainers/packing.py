"""From a global batch to micro-batches: which tokens are computed together, and which only once.

In: the sequences of a `Batch`, a token budget. Out: `MicroBatch`es of plain numpy arrays. Left to others: tensors,
attention over the layout (attention.py), logprobs (logprobs.py).

The members of a group begin with the same prompt. A micro-batch holds trees: a prefix that is computed once, then
branches, the members' own tokens. A branch sees its prefix and itself, so a causal model gives every token exactly the
hidden state that its sequence alone would. Identical inputs share one branch; the last sampled token of a sequence is
no input at all, since nothing is predicted from it. A sequence with no group member at its side is a branch without
prefix.

Axes: N input tokens of a micro-batch, U positions that predict, M trained tokens; several trained tokens may be
predicted from one position (the first tokens of all members follow the same prompt).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl360.types import Sequence

# A shorter common prefix (a BOS token, a system line) saves less than the extra attention call of its tree costs.
MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Tree:
    """`prefix_length` input tokens, then the branches' own tokens one branch after the other."""

    prefix_length: int
    branch_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed inputs and everything the objective needs about the tokens they predict."""

    token_ids_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    trees: tuple[Tree, ...]  # in the order of N
    rows_U: NDArray[np.int64]  # index into N
    temperatures_U: NDArray[np.float32]
    slots_M: NDArray[np.int64]  # index into U, ascending
    targets_M: NDArray[np.int64]
    behaviour_M: NDArray[np.float32]
    advantages_M: NDArray[np.float32]
    weights_M: NDArray[np.float32]
    sequences_M: NDArray[np.int64]  # which of this micro-batch's sequences, counted from 0
    places_M: NDArray[np.int64]  # which of its sequence's trained tokens, counted from 0


@dataclass(frozen=True, slots=True, eq=False)
class _Branch:
    inputs_T: NDArray[np.int32]  # all input tokens, the shared ones included
    sequences: tuple[Sequence, ...]  # identical inputs; usually one


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedTree:
    prefix_length: int
    branches: tuple[_Branch, ...]

    @property
    def num_tokens(self) -> int:
        return self.prefix_length + sum(b.inputs_T.size - self.prefix_length for b in self.branches)


def pack(sequences: SequenceABC[Sequence], max_tokens: int, share_prompts: bool) -> list[MicroBatch]:
    """Split a batch into micro-batches of at most `max_tokens` input tokens.

    A tree that does not fit is cut into parts, each with the prefix; a single sequence longer than the budget gets a
    micro-batch of its own. The order is deterministic. Sequences without a trained token raise ValueError.
    """
    trees: list[_PlannedTree] = []
    loose: list[_Branch] = []
    for branches in _branches_of_groups(sequences, share_prompts):
        prefix_length = _common_prefix([b.inputs_T for b in branches]) if len(branches) > 1 else 0
        if share_prompts and prefix_length >= MIN_SHARED_TOKENS:
            trees += _cut(prefix_length, branches, max_tokens)
        else:
            loose += branches
    return [_lay_out(planned) for planned in _fill(trees, max_tokens) + _fill_loose(loose, max_tokens)]


def _branches_of_groups(sequences: SequenceABC[Sequence], merge: bool) -> list[list[_Branch]]:
    groups: dict[str, dict[bytes | int, list[Sequence]]] = {}
    inputs: dict[int, NDArray[np.int32]] = {}
    for number, sequence in enumerate(sequences):
        trained = np.flatnonzero(sequence.loss_mask_T)
        if not trained.size or trained[0] == 0:
            raise ValueError(f"attempt {sequence.attempt_id}: a sequence needs a trained token that something precedes")
        inputs[id(sequence)] = sequence.token_ids_T[: trained[-1]]
        key = inputs[id(sequence)].tobytes() if merge else number
        groups.setdefault(sequence.group_id, {}).setdefault(key, []).append(sequence)
    return [[_Branch(inputs[id(same[0])], tuple(same)) for same in group.values()] for group in groups.values()]


def _common_prefix(arrays: SequenceABC[NDArray[np.int32]]) -> int:
    shortest = min(a.size for a in arrays)
    stacked = np.stack([a[:shortest] for a in arrays])
    different = np.flatnonzero((stacked != stacked[0]).any(axis=0))
    return int(different[0]) if different.size else shortest


def _cut(prefix_length: int, branches: SequenceABC[_Branch], max_tokens: int) -> list[_PlannedTree]:
    """Parts of one tree, each within the budget where one branch allows it; longest branches first, evenly filled."""
    by_length = sorted(branches, key=lambda b: -b.inputs_T.size)
    parts: list[list[_Branch]] = []
    used: list[int] = []
    for branch in by_length:
        own = branch.inputs_T.size - prefix_length
        fitting = [i for i, tokens in enumerate(used) if tokens + own <= max_tokens]
        if fitting:
            parts[fitting[0]].append(branch)
            used[fitting[0]] += own
        else:
            parts.append([branch])
            used.append(prefix_length + own)
    return [_PlannedTree(prefix_length if len(part) > 1 else 0, tuple(part)) for part in parts]


def _fill(trees: SequenceABC[_PlannedTree], max_tokens: int) -> list[list[_PlannedTree]]:
    """First-fit decreasing."""
    bins: list[list[_PlannedTree]] = []
    used: list[int] = []
    for tree in sorted(trees, key=lambda t: -t.num_tokens):
        fitting = [i for i, tokens in enumerate(used) if tokens + tree.num_tokens <= max_tokens]
        if fitting:
            bins[fitting[0]].append(tree)
            used[fitting[0]] += tree.num_tokens
        else:
            bins.append([tree])
            used.append(tree.num_tokens)
    return bins


def _fill_loose(branches: SequenceABC[_Branch], max_tokens: int) -> list[list[_PlannedTree]]:
    """Neighbours in length, together in one tree without prefix, so that padding them for attention wastes little."""
    bins: list[list[_Branch]] = []
    used = 0
    for branch in sorted(branches, key=lambda b: -b.inputs_T.size):
        if not bins or used + branch.inputs_T.size > max_tokens:
            bins.append([])
            used = 0
        bins[-1].append(branch)
        used += branch.inputs_T.size
    return [[_PlannedTree(0, tuple(members))] for members in bins]


def _lay_out(planned: SequenceABC[_PlannedTree]) -> MicroBatch:
    token_ids: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    rows, targets, temperatures, behaviour, advantages, weights = ([] for _ in range(6))
    numbers: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    offset = 0
    for tree in planned:
        prefix_start, prefix_length = offset, tree.prefix_length
        token_ids.append(tree.branches[0].inputs_T[:prefix_length])
        positions.append(np.arange(prefix_length))
        offset += prefix_length
        for branch in tree.branches:
            own_start, size = offset, branch.inputs_T.size
            token_ids.append(branch.inputs_T[prefix_length:])
            positions.append(np.arange(prefix_length, size))
            offset += size - prefix_length
            row_of_position = np.arange(size) + (own_start - prefix_length)
            row_of_position[:prefix_length] = np.arange(prefix_length) + prefix_start
            for sequence in branch.sequences:
                trained = np.flatnonzero(sequence.loss_mask_T)
                rows.append(row_of_position[trained - 1])
                targets.append(sequence.token_ids_T[trained])
                temperatures.append(np.full(trained.size, sequence.temperature, dtype=np.float32))
                behaviour.append(sequence.behaviour_logprobs_T[trained])
                advantages.append(sequence.advantages_T[trained])
                weights.append(sequence.weights_T[trained])
                numbers.append(np.full(trained.size, len(numbers)))
                places.append(np.arange(trained.size))
    all_rows, all_temperatures = np.concatenate(rows), np.concatenate(temperatures)
    order = np.lexsort((all_temperatures, all_rows))
    all_rows, all_temperatures = all_rows[order], all_temperatures[order]
    is_first = np.ones(all_rows.size, dtype=bool)  # of the tokens predicted from one position at one temperature
    is_first[1:] = (all_rows[1:] != all_rows[:-1]) | (all_temperatures[1:] != all_temperatures[:-1])
    return MicroBatch(
        token_ids_N=np.concatenate(token_ids).astype(np.int64),
        positions_N=np.concatenate(positions),
        trees=tuple(
            Tree(t.prefix_length, tuple(b.inputs_T.size - t.prefix_length for b in t.branches)) for t in planned
        ),
        rows_U=all_rows[is_first].astype(np.int64),
        temperatures_U=all_temperatures[is_first],
        slots_M=np.cumsum(is_first, dtype=np.int64) - 1,
        targets_M=np.concatenate(targets)[order].astype(np.int64),
        behaviour_M=np.concatenate(behaviour)[order],
        advantages_M=np.concatenate(advantages)[order],
        weights_M=np.concatenate(weights)[order],
        sequences_M=np.concatenate(numbers)[order],
        places_M=np.concatenate(places)[order],
    )
