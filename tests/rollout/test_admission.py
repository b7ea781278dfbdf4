"""Slots by urgency, under cancellation too, and the iterations that may be submitted."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.rollout.admission import Slots, admitted_before


def test_iterations_by_hand():
    assert admitted_before(0, max_staleness=0, iterations=10) == 1
    assert admitted_before(3, max_staleness=2, iterations=10) == 6
    assert admitted_before(8, max_staleness=5, iterations=10) == 10


async def run_in_slots(slots, priority, name, started, hold):
    async with slots.slot(priority):
        started.append(name)
        await hold.wait()


async def started_in_order(priorities, count=1):
    """Start one task for each priority while all slots are taken, then let them go one by one."""
    slots, started, hold = Slots(count), [], asyncio.Event()
    blockers = [asyncio.ensure_future(run_in_slots(slots, (-1,), "blocker", [], hold)) for _ in range(count)]
    await asyncio.sleep(0)
    ready = asyncio.Event()
    ready.set()
    tasks = [asyncio.ensure_future(run_in_slots(slots, p, i, started, ready)) for i, p in enumerate(priorities)]
    await asyncio.sleep(0)
    assert started == []
    hold.set()
    await asyncio.gather(*blockers, *tasks)
    return started


async def test_the_most_urgent_waits_least_and_equals_keep_their_order():
    assert await started_in_order([(1, 5), (1, 2), (0, 9), (1, 2), (1, 0)]) == [2, 4, 1, 3, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("agcr"), min_size=1, max_size=60), st.integers(1, 4))
def test_slots_are_neither_lost_nor_made_by_any_cancellation(steps, count):
    async def run():
        slots, inside, tasks = Slots(count), 0, []

        async def hold(number):
            nonlocal inside
            async with slots.slot((number % 3,)):
                inside += 1
                assert inside <= count
                try:
                    await asyncio.sleep(3600)
                finally:
                    inside -= 1

        for number, step in enumerate(steps):
            if step == "a":
                tasks.append(asyncio.ensure_future(hold(number)))
            elif step == "g":
                await asyncio.sleep(0)
            elif tasks:  # cancel an old or a new one, maybe in the turn in which it was granted its slot
                tasks.pop(0 if step == "c" else -1).cancel()
        for task in tasks:
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert inside == 0
        async with asyncio.timeout(1.0):
            for _ in range(count):
                await slots._acquire((0,))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await slots._acquire((0,))

    asyncio.run(run())
