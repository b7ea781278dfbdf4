"""Holding requests: none reaches an engine, those inside are known, and no clock runs meanwhile."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from rl360.errors import EngineError
from rl360.gateway.engine_pool import EnginePool, Generation
from rl360.gateway.gate import Gate
from rl360.gateway.routes import LeastLoaded
from rl360.types import Sampling
from tests.gateway.kit import tokenizer_of
from tests.gateway.stub_engine import Fault, StubEngine, StubModel

PROMPT = array("i", [1, 2, 3])


def rig(timeout_s: float = 5.0) -> tuple[EnginePool, StubEngine]:
    engine = StubEngine(StubModel(tokenizer_of(), 3))
    return EnginePool(LeastLoaded([engine]), timeout_s), engine


def ask(pool: EnginePool, session: str = "s") -> asyncio.Task[Generation]:
    turn = pool.generate(session, f"{session}.0", PROMPT, Sampling(), 50, seed=5)
    return asyncio.get_running_loop().create_task(turn)


async def test_held_requests_wait_and_then_all_go_through() -> None:
    pool, engine = rig()
    pool.hold()
    pool.hold()  # twice is once
    turns = [ask(pool, f"s{i}") for i in range(5)]
    await asyncio.sleep(0.05)
    assert engine.model.num_requests == 0
    assert await pool.idle(0.0) == 0
    pool.release()
    assert len([turn for turn in await asyncio.gather(*turns) if turn.token_ids]) == 5


async def test_idle_waits_for_what_runs_and_says_what_still_does() -> None:
    pool, engine = rig()
    engine.gate = asyncio.Event()
    running = ask(pool)
    await asyncio.sleep(0.01)
    pool.hold()
    assert await pool.idle(0.0) == 1
    assert await pool.idle(0.05) == 1
    asyncio.get_running_loop().call_later(0.05, engine.gate.set)
    assert await pool.idle(5.0) == 0
    assert (await running).token_ids  # a drained turn ends as if nothing had been
    pool.release()


async def test_an_aborted_turn_does_not_come_back_before_the_release() -> None:
    pool, engine = rig()
    engine.gate = asyncio.Event()
    engine.model.script.extend(["one two three", "four"])
    engine.model.faults.append(Fault("abort", keep=2))
    running = ask(pool)
    await asyncio.sleep(0.01)
    pool.hold()
    engine.gate.set()
    assert await pool.idle(1.0) == 0
    await asyncio.sleep(0.1)
    assert engine.model.num_requests == 1
    pool.release()
    generation = await running
    assert (engine.model.num_requests, generation.interruptions) == (2, 1)


async def test_a_request_that_failed_is_not_sent_again_before_the_release() -> None:
    pool, engine = rig()
    engine.gate = asyncio.Event()
    engine.model.faults.append(Fault("refused"))
    running = ask(pool)
    await asyncio.sleep(0.01)
    pool.hold()
    engine.gate.set()
    await asyncio.sleep(0.4)  # more than the pause before it is sent again
    assert engine.model.num_requests == 1
    pool.release()
    assert (await running).resends == 1


@pytest.mark.parametrize("before", [True, False])
async def test_a_hold_longer_than_the_deadline_of_a_turn_costs_it_nothing(before: bool) -> None:
    """Whether the turn began before the hold or within it."""
    pool, engine = rig(timeout_s=0.3)
    engine.gate = asyncio.Event()
    running = ask(pool) if before else None
    await asyncio.sleep(0.01)
    pool.hold()
    running = running or ask(pool)
    await asyncio.sleep(0.6)
    pool.release()
    engine.gate.set()
    assert (await running).token_ids


async def test_after_the_release_the_deadline_holds_again() -> None:
    pool, engine = rig(timeout_s=0.3)
    engine.gate = asyncio.Event()  # never set
    running = ask(pool)
    pool.hold()
    await asyncio.sleep(0.5)
    began = asyncio.get_running_loop().time()
    pool.release()
    with pytest.raises(EngineError, match=r"no answer within 0\.3 s"):
        await running
    assert asyncio.get_running_loop().time() - began < 10.0


@pytest.mark.parametrize("held", [True, False])
async def test_while_no_engine_serves_no_clock_runs(held: bool) -> None:
    """A server takes minutes to start. A hold that ends meanwhile starts no clock."""
    pool, engine = rig(timeout_s=0.3)
    running = [ask(pool, "before")]
    engine.gate = asyncio.Event()
    await asyncio.sleep(0.01)
    if held:
        pool.hold()
    pool.set_engines([])
    running.append(ask(pool, "after"))
    pool.release()
    await asyncio.sleep(0.6)
    engine.gate.set()
    pool.set_engines([engine])
    assert all(turn.token_ids for turn in await asyncio.gather(*running))


async def test_a_request_that_waits_for_an_engine_waits_for_the_gate_too() -> None:
    pool, engine = rig()
    pool.set_engines([])
    running = ask(pool)
    await asyncio.sleep(0.01)
    pool.hold()
    pool.set_engines([engine])
    await asyncio.sleep(0.05)
    assert engine.model.num_requests == 0
    pool.release()
    assert (await running).token_ids


async def test_a_gate_that_closes_again_at_once_lets_nobody_through() -> None:
    gate = Gate()
    gate.close()
    passed = []

    async def go() -> None:
        await gate.until_open()
        passed.append(gate.is_open)

    task = asyncio.get_running_loop().create_task(go())
    await asyncio.sleep(0)
    gate.open()
    gate.close()
    await asyncio.sleep(0.01)
    assert passed == []
    gate.open()
    await task
    assert passed == [True]
