from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.models.decoder import Decoder, DecoderConfig
from rl360.trainers.attention import tree_attend
from rl360.trainers.logprobs import Predictions, backward_through_head
from rl360.trainers.megatron.shards import equal_cost_tokens, sequence_cost, shard_batch
from rl360.trainers.packing import Tree, pack
from tests.trainers.helpers import TINY, batch_of, random_batch, sequence


def trained(micros):
    """(context, target, temperature, behaviour, advantage, weight) of every trained token, with its number of times."""
    rows = Counter()
    for micro in micros:
        (tree,) = micro.trees
        assert tree.prefix_length == 0
        starts = np.repeat(np.cumsum([0, *tree.branch_lengths[:-1]]), tree.branch_lengths)
        assert micro.positions_N.tolist() == (np.arange(micro.token_ids_N.size) - starts).tolist()
        for m, slot in enumerate(micro.slots_M):
            row = micro.rows_U[slot]
            context = tuple(micro.token_ids_N[starts[row] : row + 1].tolist())
            numbers = (micro.behaviour_M[m], micro.advantages_M[m], micro.weights_M[m])
            rows[(context, int(micro.targets_M[m]), micro.temperatures_U[slot], *numbers)] += 1
    return rows


def expected(batch):
    rows = Counter()
    for s in batch.sequences:
        for t in np.flatnonzero(s.loss_mask_T):
            numbers = (s.behaviour_logprobs_T[t], s.advantages_T[t], s.weights_T[t])
            context = tuple(s.token_ids_T[:t].tolist())
            rows[(context, int(s.token_ids_T[t]), np.float32(s.temperature), *numbers)] += 1
    return rows


def costs(shards, equal_cost):
    """Of each rank, from the lengths of the branches that predict something."""
    found = []
    for rank in shards:
        cost = 0.0
        for micro in rank:
            ends = np.cumsum(micro.trees[0].branch_lengths)
            used = set(np.searchsorted(ends, micro.rows_U, side="right").tolist())
            cost += sum(sequence_cost(micro.trees[0].branch_lengths[i], equal_cost) for i in used)
        found.append(cost)
    return found


def test_two_ranks_by_hand():
    # inputs of 6, 5, 4, 3 tokens, attention negligible: 6 and 3 against 5 and 4, padded to 4s
    sequences = [sequence([1] * n, [2], attempt=str(n)) for n in (3, 6, 4, 5)]
    shards = shard_batch(batch_of(sequences), data_parallel=2, max_tokens=12, pad_multiple=4, equal_cost=1e9)
    assert [[micro.trees for micro in rank] for rank in shards] == [[(Tree(0, (6, 3, 3)),)], [(Tree(0, (5, 4, 3)),)]]
    assert shards[0][0].token_ids_N.tolist() == [1] * 9 + [0] * 3
    assert shards[0][0].positions_N.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]
    assert shards[0][0].rows_U.tolist() == [5, 8]


def test_attention_makes_a_long_sequence_worth_several_short_ones():
    # with equal_cost 10 the 20 tokens cost 20 + 40 = 60, each of the 10 costs 10 + 10 = 20: three of them, not two
    sequences = [sequence([1] * n, [2], attempt=str(i)) for i, n in enumerate((20, 10, 10, 10))]
    shards = shard_batch(batch_of(sequences), data_parallel=2, max_tokens=64, equal_cost=10.0)
    assert [rank[0].trees[0].branch_lengths for rank in shards] == [(20,), (10, 10, 10)]


def test_ranks_without_work_get_fillers_that_predict_nothing():
    batch = batch_of([sequence([1, 2, 3], [4, 5])])
    shards = shard_batch(batch, data_parallel=3, max_tokens=8, pad_multiple=8, count_multiple=2)
    assert [len(rank) for rank in shards] == [2, 2, 2]
    assert shards[0][0].targets_M.tolist() == [4, 5]
    for filler in [shards[0][1], *shards[1], *shards[2]]:
        assert filler.token_ids_N.tolist() == [0] * 8
        assert (filler.rows_U.size, filler.weights_M.size, filler.trees) == (0, 0, (Tree(0, (8,)),))


def test_more_micro_batches_than_needed_share_the_work():
    # 4 are asked for: 6 sequences of 4 inputs fit in one of 24, and go into 4 of (8, 8, 4, 4) instead
    batch = batch_of([sequence([1, 2, 3, 4], [5], attempt=str(i)) for i in range(6)])
    (rank,) = shard_batch(batch, data_parallel=1, max_tokens=24, count_multiple=4)
    assert [micro.token_ids_N.size for micro in rank] == [8, 8, 4, 4]


def test_the_longest_micro_batch_comes_first():
    # costs 24, 20 and 18: the third joins the second, and 38 tokens come before 24
    batch = batch_of([sequence([1] * n, [2], attempt=str(n)) for n in (24, 20, 18)])
    (rank,) = shard_batch(batch, data_parallel=1, max_tokens=40)
    assert [micro.trees[0].branch_lengths for micro in rank] == [(20, 18), (24,)]


def test_a_sequence_beyond_the_budget_has_a_micro_batch_to_itself():
    batch = batch_of([sequence([1] * 50, [2]), sequence([1] * 3, [2]), sequence([1] * 3, [3])])
    (rank,) = shard_batch(batch, data_parallel=1, max_tokens=10, pad_multiple=4)
    assert sorted(micro.trees[0].branch_lengths for micro in rank) == [(3, 3, 2), (50, 2)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    data_parallel=st.integers(1, 5),
    max_tokens=st.integers(8, 120),
    pad_multiple=st.sampled_from([1, 2, 8]),
    count_multiple=st.integers(1, 3),
    equal_cost=st.sampled_from([5.0, 100.0, 47_000.0]),
)
def test_every_token_once_within_the_budget_and_balanced(
    seed, data_parallel, max_tokens, pad_multiple, count_multiple, equal_cost
):
    draw = np.random.default_rng(seed)
    batch = random_batch(seed, groups=int(draw.integers(1, 4)), completion=int(draw.integers(1, 60)))

    def cut():
        return shard_batch(
            batch,
            data_parallel=data_parallel,
            max_tokens=max_tokens,
            pad_multiple=pad_multiple,
            count_multiple=count_multiple,
            equal_cost=equal_cost,
        )

    shards = cut()
    micros = [micro for rank in shards for micro in rank]
    assert trained(micros) == expected(batch)
    assert len(shards) == data_parallel
    (count,) = {len(rank) for rank in shards}
    assert count % count_multiple == 0
    for rank in shards:
        sizes = [micro.token_ids_N.size for micro in rank]
        assert sizes == sorted(sizes, reverse=True)
    for micro in micros:
        assert micro.token_ids_N.size % pad_multiple == 0
        predicting = np.unique(np.searchsorted(np.cumsum(micro.trees[0].branch_lengths), micro.rows_U, side="right"))
        assert micro.token_ids_N.size <= max_tokens or predicting.size == 1
    by_rank = costs(shards, equal_cost)
    largest = max(sequence_cost(int(np.flatnonzero(s.loss_mask_T)[-1]), equal_cost) for s in batch.sequences)
    assert max(by_rank) - min(by_rank) <= largest + 1e-6
    # No micro-batch more than first-fit decreasing needs on the fullest rank, up to the multiple: at most one of a
    # rank's bins is half empty (beside those that one sequence overfills).
    fullest = max(
        sum(1 for m in rank if m.rows_U.size and m.token_ids_N.size > max_tokens)
        + -(-2 * sum(m.token_ids_N.size for m in rank) // max(max_tokens // pad_multiple * pad_multiple, 1))
        for rank in shards
    )
    assert count <= fullest + count_multiple
    for first, second in zip(micros, (micro for rank in cut() for micro in rank), strict=True):
        assert first.token_ids_N.tolist() == second.token_ids_N.tolist()
        assert first.weights_M.tolist() == second.weights_M.tolist()


def gradient(decoder, micros):
    """Of sum(weight x advantage x logprob) over all micro-batches, by the machinery of trainer=torch."""
    decoder.zero_grad()
    head_grad = torch.zeros_like(decoder.head_weight)
    for micro in micros:
        predictions = Predictions(
            *(torch.from_numpy(a) for a in (micro.temperatures_U, micro.slots_M, micro.targets_M))
        )
        attend = tree_attend(micro.trees, decoder.dtype)
        hidden = decoder.hidden(torch.from_numpy(micro.token_ids_N), torch.from_numpy(micro.positions_N), attend)
        hidden = hidden.index_select(0, torch.from_numpy(micro.rows_U))
        coefficients = torch.from_numpy(micro.weights_M * micro.advantages_M).double()
        if not micro.rows_U.size:
            continue
        hidden_grad, _ = backward_through_head(
            hidden.detach(), decoder.head_weight, predictions, 7, lambda t, _, c=coefficients: c[t], head_grad
        )
        hidden.backward(hidden_grad)
    found = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    return found | {"head": head_grad}


@pytest.mark.parametrize(
    ("data_parallel", "max_tokens", "pad", "multiple"), [(2, 40, 4, 1), (3, 64, 8, 2), (5, 30, 1, 3)]
)
def test_the_parts_gradients_add_up_to_that_of_the_batch(data_parallel, max_tokens, pad, multiple):
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig.from_hf(TINY)).double()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batch = random_batch(5)
    whole = gradient(decoder, pack(batch.sequences, 10_000, share_prompts=False))
    shards = shard_batch(
        batch, data_parallel=data_parallel, max_tokens=max_tokens, pad_multiple=pad, count_multiple=multiple
    )
    parts = [gradient(decoder, rank) for rank in shards]
    for name, expected_grad in whole.items():
        total = sum(part[name] for part in parts if name in part)
        torch.testing.assert_close(total, expected_grad, rtol=1e-9, atol=1e-12)


def test_the_length_of_equal_cost_of_qwen3_8b():
    config = DecoderConfig.from_hf(
        TINY
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    )
    # a layer has 4096 x (4096 + 1024 + 1024 + 4096) + 3 x 4096 x 12288 weights, over 4096 head values
    assert equal_cost_tokens(config) == 10240 + 36864
    assert sequence_cost(100, equal_cost=50.0) == 300.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 3, "pad_multiple": 4}, "below pad_multiple 4"),
        ({"data_parallel": 0}, "data_parallel 0"),
        ({"count_multiple": 0}, "count_multiple 0"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        shard_batch(batch_of([sequence([1], [2])]), **({"data_parallel": 1, "max_tokens": 8} | change))


def test_an_empty_batch_and_an_untrained_sequence_are_refused():
    with pytest.raises(ValueError, match="no sequences"):
        shard_batch(batch_of([]), data_parallel=1, max_tokens=8)
    with pytest.raises(ValueError, match="attempt a: a sequence needs a trained token"):
        shard_batch(batch_of([sequence([1, 2], [])]), data_parallel=1, max_tokens=8)
