"""Engine against trainer logprobs: numbers by hand, and the same numbers however the tokens are split."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl360.trainers.megatron.shards import shard_batch
from rl360.trainers.mismatch import RANGES, mismatch_means, mismatch_sums
from rl360.trainers.packing import pack
from tests.trainers.helpers import random_batch, sequence


def totals(parts):
    """What a trainer adds up over micro-batches and ranks."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            added = max(found[name], float(value)) if name in found and name.endswith("_max") else float(value)
            found[name] = added if name.endswith("_max") else found.get(name, 0.0) + added
    return found


def test_by_hand_on_four_tokens():
    # proximal / behaviour: 2 and 1 among the first 64 tokens, 8 at place 64, 1/2 at place 5000
    proximal = torch.tensor([0.4, 0.4, 0.4, 0.4], dtype=torch.float64).log()
    behaviour = torch.tensor([0.2, 0.4, 0.05, 0.8], dtype=torch.float64).log()
    places = torch.tensor([0, 63, 64, 5000])
    found = mismatch_means(totals([mismatch_sums(proximal, behaviour, torch.full((4,), 0.25), places)]))
    k3 = [r - 1 - math.log(r) for r in (2.0, 1.0, 8.0, 0.5)]
    gaps = [math.log(2), 0.0, math.log(8), math.log(2)]
    expected = {
        "mismatch/kl": sum(k3) / 4,
        "mismatch/logprob_diff_mean": sum(gaps) / 4,
        "mismatch/logprob_diff_max": math.log(8),
        "mismatch/ratio_max": 8.0,
        "mismatch/position/0-64/kl": (k3[0] + k3[1]) / 2,
        "mismatch/position/0-64/logprob_diff_mean": (gaps[0] + gaps[1]) / 2,
        "mismatch/position/0-64/ratio_max": 2.0,
        "mismatch/position/0-64/share": 0.5,
        "mismatch/position/64-256/kl": k3[2],
        "mismatch/position/64-256/logprob_diff_mean": gaps[2],
        "mismatch/position/64-256/ratio_max": 8.0,
        "mismatch/position/64-256/share": 0.25,
        "mismatch/position/1024-up/kl": k3[3],
        "mismatch/position/1024-up/logprob_diff_mean": gaps[3],
        "mismatch/position/1024-up/ratio_max": 0.5,
        "mismatch/position/1024-up/share": 0.25,
    }
    assert found == pytest.approx(expected)


def test_small_differences_are_not_lost_in_rounding():
    """k3 of d = 1e-4 is 5e-9; exp(d) - 1 - d in fp32 would be off by more than that."""
    behaviour = torch.full((1,), -0.25)  # this and its sum with 2^-13 are exact in fp32
    found = mismatch_sums(behaviour + 2.0**-13, behaviour, torch.ones(1), torch.zeros(1, dtype=torch.int64))
    exact = math.expm1(2.0**-13) - 2.0**-13
    assert float(found["mismatch/kl"]) == pytest.approx(exact, rel=1e-2)


def test_one_absurd_token_stays_finite():
    found = mismatch_sums(torch.zeros(1), torch.full((1,), -500.0), torch.ones(1), torch.zeros(1, dtype=torch.int64))
    assert all(math.isfinite(float(value)) for value in found.values())
    assert float(found["mismatch/logprob_diff_max"]) == 500.0


@given(
    tokens=st.lists(
        st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01), st.floats(0.001, 1.0), st.integers(0, 3000)),
        min_size=1,
        max_size=30,
    ),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_parts_add_up_to_the_whole(tokens, cuts):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    arguments = (*columns[:3], columns[3].long())
    whole = mismatch_means(totals([mismatch_sums(*arguments)]))
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    parts = [mismatch_sums(*(column[a:b] for column in arguments)) for a, b in pairwise(edges) if a < b]
    assert mismatch_means(totals(parts)) == pytest.approx(whole)
    shares = sum(value for name, value in whole.items() if name.endswith("/share"))
    assert shares == pytest.approx(float(columns[2].sum()))


def test_places_count_sampled_tokens_of_each_sequence_through_packing_and_sharding():
    """Tool replies between sampled tokens are no places; shared prompts, fillers and ranks change nothing."""
    batch = random_batch(3)
    expected = sorted(place for s in batch.sequences for place in range(int(s.loss_mask_T.sum())))
    for share in (False, True):
        for micro in pack(batch.sequences, 40, share):
            for number in set(micro.sequences_M.tolist()):
                own = np.sort(micro.places_M[micro.sequences_M == number])
                assert own.tolist() == list(range(own.size))
        found = sorted(int(p) for micro in pack(batch.sequences, 40, share) for p in micro.places_M)
        assert found == expected
    ranks = shard_batch(batch, data_parallel=2, max_tokens=40, pad_multiple=4, count_multiple=2)
    assert sorted(int(p) for rank in ranks for micro in rank for p in micro.places_M) == expected


def test_a_token_in_the_first_range_and_one_beyond_by_the_trainer(tmp_path):
    """The trainer's own numbers for a long answer against a direct computation from its logprobs."""
    from rl360.algorithms.grpo import GRPO
    from rl360.trainers.torch_trainer import TorchTrainer
    from tests.trainers.helpers import batch_of, tiny_folder

    row = sequence(list(range(10, 14)), [5 + i % 40 for i in range(70)], weight=1 / 70, behaviour=-4.0)
    results = []
    for chunk, updates in ((3, 1), (1000, 1), (16, 2)):
        trainer = TorchTrainer(
            0.0, logprob_chunk_tokens=chunk, device="cpu", num_threads=1, model_dir=tiny_folder(tmp_path / "model"),
            random_init_seed=1, algorithm=GRPO(updates_per_batch=updates),
        )  # fmt: skip
        trainer.start()
        results.append({k: v for k, v in trainer.step(batch_of([row])).metrics.items() if k.startswith("mismatch/")})
    first, *others = results
    assert {name for name in first if "/position/" in name} == {
        f"mismatch/position/{name}/{what}"
        for name in RANGES[:2]
        for what in ("kl", "logprob_diff_mean", "ratio_max", "share")
    }
    assert first["mismatch/position/64-256/share"] == pytest.approx(6 / 70)
    parts = (first[f"mismatch/position/{name}/kl"] * first[f"mismatch/position/{name}/share"] for name in RANGES[:2])
    assert sum(parts) == pytest.approx(first["mismatch/kl"])
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)
