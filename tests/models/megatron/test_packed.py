"""The cut of a packed stream over context ranks: every token once, and attention as if nothing were cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.models.decoder import causal_attend
from rl360.models.megatron.attention import _attend_span
from rl360.models.megatron.packed import PackedInputs, PackedTensors, chunk_bounds


@st.composite
def streams(draw):
    """Sequence lengths that add up to a multiple of 2 x context, and the context size."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    lengths = draw(st.lists(st.integers(1, 13), min_size=1, max_size=8))
    missing = -sum(lengths) % (2 * size)
    return ([*lengths, missing] if missing else lengths), size


def inputs(lengths, size, rank):
    ids = np.arange(100, 100 + sum(lengths), dtype=np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return PackedInputs.of(ids, positions, lengths, size, rank)


def test_zigzag_by_hand():
    # 16 tokens, 2 ranks: chunks of 4, rank 0 has the first and the last, rank 1 the two in the middle
    assert chunk_bounds(16, 2, 0) == [(0, 4), (12, 16)]
    assert chunk_bounds(16, 2, 1) == [(4, 8), (8, 12)]
    part = inputs([6, 10], 2, 1)
    assert part.token_ids_L.tolist() == list(range(104, 112))
    assert part.positions_L.tolist() == [4, 5, 0, 1, 2, 3, 4, 5]
    first, second = part.spans
    # tokens 4..8: the end of the first sequence sees it from its start; the second one starts inside the chunk
    assert (first.key_start, first.key_stop) == (0, 8)
    assert first.cu_q.tolist() == [0, 2, 4]
    assert first.cu_k.tolist() == [0, 6, 8]
    # tokens 8..12: all of the second sequence, which starts at 6
    assert (second.query_start, second.key_start, second.key_stop) == (4, 6, 12)
    assert second.cu_q.tolist() == [0, 4]
    assert second.cu_k.tolist() == [0, 6]
    assert (second.max_q, second.max_k) == (4, 6)


@given(streams())
def test_every_token_is_in_one_rank_and_its_row_is_found_there(stream):
    lengths, size = stream
    total = sum(lengths)
    found = np.full(total, -1)
    rows = np.arange(total)
    for rank in range(size):
        part = inputs(lengths, size, rank)
        here, places = part.local_rows(rows)
        assert (part.token_ids_L[places] == 100 + rows[here]).all()
        assert (found[rows[here]] == -1).all()
        found[rows[here]] = rank
        assert here.sum() == part.token_ids_L.size == total // size
    assert (found >= 0).all()


@settings(max_examples=30, deadline=None)
@given(streams(), st.integers(0, 2**31))
def test_attention_of_the_parts_is_that_of_the_whole(stream, seed):
    lengths, size = stream
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    expected = causal_attend(lengths)(0, q, k, v)
    for rank in range(size):
        packed = PackedTensors.of(inputs(lengths, size, rank), torch.device("cpu"))
        local = packed.token_ids_L - 100
        for span in packed.spans:
            bounds = span.bounds
            mine = local[bounds.query_start : bounds.query_stop]
            keys = slice(bounds.key_start, bounds.key_stop)
            torch.testing.assert_close(_attend_span(q[mine], k[keys], v[keys], span), expected[mine])


def test_the_two_chunks_of_a_rank_cost_about_the_same_for_all_ranks():
    pairs = []
    for rank in range(4):
        spans = inputs([4096], 4, rank).spans
        pairs.append(sum((s.query_stop - s.query_start) * s.key_stop for s in spans))
    assert max(pairs) - min(pairs) <= 0.01 * max(pairs)


def test_lengths_must_cover_the_stream():
    with pytest.raises(AssertionError, match="add up to 5"):
        PackedInputs.of(np.zeros(6, np.int64), np.zeros(6, np.int64), [5])
