"""The virtual clock against cases worked by hand, and what must hold for any."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl360.diagnostics.simulate import AttemptWork, Setup, simulate


def setup(**changes):
    plain = {
        "iterations": 3,
        "tasks_per_iteration": 1,
        "group_size": 2,
        "max_staleness": 0,
        "concurrency": 100,
        "request_tokens_per_s": 100.0,
        "train_s": 2.0,
    }
    return Setup(**plain | changes)


def members(*tokens, **rest):
    """Each member of every group samples these tokens."""
    return lambda iteration, slot, member: AttemptWork(tokens[member], **rest)


def test_on_policy_each_iteration_waits_for_its_longest_attempt():
    # 1 s and 3 s side by side, then 2 s of training and half a second of publishing
    found = simulate(setup(publish_s=0.5), members(100, 300))
    assert [row.began_s for row in found.rows] == [0.0, 5.5, 11.0]
    assert [(row.wait_s, row.step_s) for row in found.rows] == [(3.0, 5.5)] * 3
    assert (found.staleness_max, found.staleness_mean, found.tokens_per_s) == (0, 0.0, pytest.approx(400 / 5.5))
    assert found.attempts_per_hour == pytest.approx(2 * 3600 / 5.5)
    assert found.trainer_wait_share == pytest.approx(3.0 / 5.5)
    assert found.engine_busy_share == pytest.approx(3.0 / 5.5)


def test_one_slot_makes_attempts_wait_for_each_other():
    assert simulate(setup(concurrency=1), members(100, 300)).rows[0].wait_s == pytest.approx(4.0)


def test_requests_share_a_full_engine():
    # 100 tokens/s together: both at 50/s until the shorter has its 100 after 2 s, the other's 200 more take 2 s
    assert simulate(setup(engine_tokens_per_s=100.0), members(100, 300)).rows[0].wait_s == pytest.approx(4.0)
    # two engines: each has one
    assert simulate(setup(engine_tokens_per_s=100.0, engines=2), members(100, 300)).rows[0].wait_s == pytest.approx(3.0)
    # 100/s alone and 200/s at most: a token takes 5 ms and 5 ms a request. Two: 15 ms, 100 tokens 1.5 s; then 10 ms
    found = simulate(setup(engine_tokens_per_s=200.0), members(100, 300))
    assert found.rows[0].wait_s == pytest.approx(1.5 + 200 * 0.010)


def test_sandbox_tools_and_verifier_take_their_time():
    # 1 s sandbox, half of 2 s sampling, 4 s of tools, the other half, 3 s verifier
    work = members(200, 200, turns=2, before_s=1.0, tools_s=4.0, after_s=3.0)
    assert simulate(setup(), work).rows[0].wait_s == pytest.approx(1 + 1 + 4 + 1 + 3)
    # tools between three turns; engines are busy for 3 x 1 of 12 s
    found = simulate(setup(train_s=0.0), members(300, 300, turns=3, before_s=1.0, tools_s=4.0, after_s=4.0))
    assert found.rows[0].wait_s == pytest.approx(12.0)
    assert found.engine_busy_share == pytest.approx(3 / 12)


def test_one_version_ahead_by_hand():
    """3 s of rollout, 2 s of training.

    0 and 1 start at 0 and end at 3. 0 trains until 5; 2 starts at 5 under version 1. 1 is there: it trains until 7, and
    2 goes on under version 2 for its last second; 3 starts. 2 ends at 8 and trains until 10, when 3 has just ended.
    """
    found = simulate(setup(iterations=4, max_staleness=1), members(300, 300))
    assert [row.began_s for row in found.rows] == [0.0, 5.0, 7.0, 10.0]
    assert [row.wait_s for row in found.rows] == [3.0, 0.0, 1.0, 0.0]
    assert [row.groups_ahead for row in found.rows] == [1, 0, 0, 0]
    assert [row.staleness_max for row in found.rows] == [0, 1, 1, 1]
    assert [row.staleness_mean for row in found.rows] == pytest.approx([0.0, 1.0, 2 / 3, 1.0])
    assert [row.mixed_versions_share for row in found.rows] == [0.0, 0.0, 1.0, 0.0]


def test_a_stall_delays_what_is_sampled_and_not_what_runs_tools():
    # iteration 1 samples 5 s from 0 on, 2 of them (2..4) in the stall at the end of publishing: it ends at 7
    work = lambda iteration, slot, member: AttemptWork([100, 500][iteration])  # noqa: E731
    changes = {"iterations": 2, "max_staleness": 1, "train_s": 1.0, "publish_s": 2.0}
    assert simulate(setup(**changes, stall_s=2.0), work).rows[1].wait_s == pytest.approx(7.0 - 4.0)
    assert simulate(setup(**changes), work).rows[1].wait_s == pytest.approx(5.0 - 4.0)
    tools = lambda iteration, slot, member: AttemptWork(100, after_s=[0, 4][iteration])  # noqa: E731
    assert simulate(setup(**changes, stall_s=2.0), tools).rows[1].wait_s == pytest.approx(5.0 - 4.0)


def test_colocated_engines_rest_while_the_trainer_works():
    # 1 samples its first second with 0, rests from 1 to 3 and needs 4 s more
    work = lambda iteration, slot, member: AttemptWork([100, 500][iteration])  # noqa: E731
    rows = simulate(setup(iterations=2, max_staleness=1, colocated=True), work).rows
    assert (rows[1].began_s, rows[1].wait_s) == (3.0, 4.0)


def test_a_step_takes_longer_with_more_tokens():
    assert simulate(setup(train_tokens_per_s=200.0), members(100, 300)).rows[0].train_s == pytest.approx(2.0 + 2.0)


@example(
    seed=1, staleness=2, concurrency=3, engines=1, shared=False, colocated=False
)  # a mean above the largest, by rounding
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(0, 4),
    concurrency=st.integers(1, 12),
    engines=st.integers(1, 3),
    shared=st.booleans(),
    colocated=st.booleans(),
)
def test_staleness_order_and_tokens_hold_for_any_times(seed, staleness, concurrency, engines, shared, colocated):
    def work(iteration, slot, member):
        draw = np.random.default_rng((seed, iteration, slot, member))
        return AttemptWork(
            tokens=float(draw.integers(1, 500)),
            turns=int(draw.integers(1, 4)),
            before_s=float(draw.exponential(0.3)),
            tools_s=float(draw.pareto(1.5)),
            after_s=float(draw.exponential(0.2)),
        )

    plan = setup(
        iterations=6,
        tasks_per_iteration=2,
        max_staleness=staleness,
        concurrency=concurrency,
        engines=engines,
        engine_tokens_per_s=250.0 if shared else float("inf"),
        train_s=float(seed % 3),
        publish_s=0.5,
        stall_s=0.25,
        colocated=colocated,
    )
    found = simulate(plan, work)
    assert found == simulate(plan, work)
    assert found.staleness_max <= staleness
    for iteration, row in enumerate(found.rows):
        assert sorted(row.groups) == [(iteration, 0), (iteration, 1)]
        assert row.tokens == sum(work(iteration, slot, member).tokens for slot in range(2) for member in range(2))
        assert 0.0 <= row.staleness_mean <= row.staleness_max
        assert row.began_s == pytest.approx(sum(before.step_s for before in found.rows[:iteration]))
    # No attempt is faster than its engine alone, and nothing waits for ever.
    assert (
        found.rows[0].wait_s
        >= max(
            work(0, s, m).tokens / 100 + work(0, s, m).before_s + work(0, s, m).after_s
            for s in range(2)
            for m in range(2)
        )
        - 1e-9
    )
    assert 0.0 <= found.engine_busy_share <= 1.0


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ValueError, match=r"(?s)engines: 0; .*train_s: -1.0; .*full engine is less.*stall_s: 3"):
        simulate(setup(engines=0, train_s=-1.0, engine_tokens_per_s=50.0, stall_s=3.0), members(1, 1))


def test_any_number_of_attempts_may_take_no_time():
    plan = setup(tasks_per_iteration=64, group_size=64, concurrency=1, train_s=0.0)
    found = simulate(plan, lambda *_: AttemptWork(tokens=0.0))
    assert found.step_s == found.tokens_per_s == 0.0
    assert found.attempts_per_hour == math.inf


def test_work_that_makes_no_sense_is_refused():
    work = AttemptWork(tokens=-1.0, turns=0, tools_s=math.nan)
    with pytest.raises(ValueError, match=r"(?s)turns: 0; .*tokens: -1.0; .*tools_s: nan"):
        simulate(setup(), lambda *_: work)
