import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.trainers.packing import MIN_SHARED_TOKENS, MicroBatch, Tree, pack
from tests.trainers.helpers import random_batch, sequence

PROMPT = list(range(10, 20))


def paths(micro: MicroBatch) -> list[tuple[int, ...]]:
    """The tokens that each input row sees, itself last, read off the layout."""
    seen: list[tuple[int, ...]] = []
    offset = 0
    for tree in micro.trees:
        ids = micro.token_ids_N[offset : offset + tree.prefix_length].tolist()
        seen += [tuple(ids[: i + 1]) for i in range(tree.prefix_length)]
        offset += tree.prefix_length
        for length in tree.branch_lengths:
            own = micro.token_ids_N[offset : offset + length].tolist()
            seen += [tuple(ids + own[: i + 1]) for i in range(length)]
            offset += length
    assert offset == micro.token_ids_N.size
    return seen


def predictions(micros: list[MicroBatch]) -> list[tuple]:
    """(context, target, temperature, behaviour, advantage, weight) of every trained token, sorted."""
    rows = []
    for micro in micros:
        seen = paths(micro)
        assert [len(path) - 1 for path in seen] == micro.positions_N.tolist()
        assert (np.diff(micro.slots_M) >= 0).all()
        for m, slot in enumerate(micro.slots_M):
            context = seen[micro.rows_U[slot]]
            numbers = (micro.behaviour_M[m], micro.advantages_M[m], micro.weights_M[m])
            rows.append((context, int(micro.targets_M[m]), micro.temperatures_U[slot], *numbers))
    return sorted(rows)


def expected_predictions(sequences) -> list[tuple]:
    rows = []
    for s in sequences:
        for t in np.flatnonzero(s.loss_mask_T):
            numbers = (s.behaviour_logprobs_T[t], s.advantages_T[t], s.weights_T[t])
            rows.append((tuple(s.token_ids_T[:t].tolist()), int(s.token_ids_T[t]), np.float32(s.temperature), *numbers))
    return sorted(rows)


def test_two_members_by_hand():
    members = [sequence(PROMPT, [1, 2, 3], advantage=1.0), sequence(PROMPT, [1, 5], advantage=-1.0, behaviour=-2.0)]
    (micro,) = pack(members, max_tokens=100, share_prompts=True)
    # inputs [prompt 1 2] and [prompt 1]: the shorter is all prefix, the longer adds one token
    assert micro.trees == (Tree(11, (1, 0)),)
    assert micro.token_ids_N.tolist() == [*PROMPT, 1, 2]
    assert micro.positions_N.tolist() == list(range(12))
    assert micro.rows_U.tolist() == [9, 10, 11]
    assert micro.slots_M.tolist() == [0, 0, 1, 1, 2]
    assert micro.targets_M.tolist() == [1, 1, 2, 5, 3]
    assert micro.advantages_M.tolist() == [1, -1, 1, -1, 1]
    assert micro.behaviour_M.tolist() == [-3, -2, -3, -2, -3]


def test_identical_members_are_computed_once():
    (micro,) = pack([sequence(PROMPT, [1, 2, 3]) for _ in range(5)], max_tokens=100, share_prompts=True)
    assert micro.token_ids_N.tolist() == [*PROMPT, 1, 2]
    assert (micro.rows_U.size, micro.targets_M.size) == (3, 15)


def test_no_sharing_below_the_least_prefix_or_when_switched_off_or_across_groups():
    short = [sequence([1], [2, 3], group="s"), sequence([1], [4, 5], group="s")]
    off = [sequence(PROMPT, [1, 2]), sequence(PROMPT, [3, 4])]
    other = [sequence(PROMPT, [1, 2], group="a"), sequence(PROMPT, [3, 4], group="b")]
    assert pack(short, 100, share_prompts=True)[0].trees == (Tree(0, (2, 2)),)
    assert pack(off, 100, share_prompts=False)[0].trees == (Tree(0, (11, 11)),)
    assert pack(other, 100, share_prompts=True)[0].trees == (Tree(0, (11, 11)),)
    assert len(PROMPT) >= MIN_SHARED_TOKENS


def test_a_tree_is_cut_to_the_budget_and_a_long_sequence_gets_its_own():
    members = [sequence(PROMPT, [30 + i, *range(40, 49)], attempt=str(i)) for i in range(5)]  # 9 own input tokens each
    assert [m.token_ids_N.size for m in pack(members, max_tokens=28, share_prompts=True)] == [28, 28, 19]
    assert [m.token_ids_N.size for m in pack(members, max_tokens=5, share_prompts=True)] == [19] * 5


def test_a_sequence_without_a_trained_or_predictable_token_is_refused():
    for bad in (sequence(PROMPT, []), sequence([], [1, 2])):
        with pytest.raises(ValueError, match="trained token"):
            pack([bad], 100, share_prompts=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 120), st.booleans())
def test_every_trained_token_is_predicted_once_from_its_own_context(seed, max_tokens, share):
    sequences = random_batch(seed, groups=3, members=5, prompt=9, completion=8).sequences
    micros = pack(sequences, max_tokens, share)
    assert predictions(micros) == expected_predictions(sequences)
    longest = max(s.token_ids_T.size for s in sequences)
    assert max(m.token_ids_N.size for m in micros) <= max(max_tokens, longest)
