"""The proxy's own choice of an engine: one that fails attracts nobody, and is asked again when it is fit."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from rl360.errors import EngineError
from rl360.gateway.generation import sampling_params
from rl360.gateway.prompt_ids import IdText
from rl360.gateway.routes import LeastLoaded, Routed, may_serve, refuses_request, resend_rid
from rl360.types import Sampling
from tests.gateway.kit import tokenizer_of
from tests.gateway.stub_engine import Fault, StubEngine, StubModel

PARAMS = sampling_params(Sampling(), 8, 1)
PROMPT = array("i", [1, 2, 3])


def engines(count: int) -> list[StubEngine]:
    return [StubEngine(StubModel(tokenizer_of(), 3), f"stub://{index}") for index in range(count)]


async def ask(route: LeastLoaded, session: str) -> Routed:
    return await route.ask(session, f"{session}.0.0", IdText().of(PROMPT), PARAMS)


async def test_an_engine_that_fails_fast_does_not_attract_the_new_sessions() -> None:
    bad, good = both = engines(2)
    route = LeastLoaded(both, first_look_s=60.0)
    bad.model.faults.extend([Fault("status", 500)] * 9)
    good.model.delay_s = 0.05  # it always has more requests open than the one that fails at once
    answers = await asyncio.gather(*(ask(route, f"s{i}") for i in range(2)))
    answers += [await ask(route, f"n{i}") for i in range(6)]
    assert {answer.engine_url for answer in answers} == {good.url}
    assert bad.model.num_requests == 1
    assert route.counts() == {
        "engine_resends": 1, "engine_moves": 1, "engines_left_out_now": 1, "engines_left_out": 1,
    }  # fmt: skip
    await route.close()


async def test_it_is_asked_again_when_it_has_the_newest_weights() -> None:
    bad, good = both = engines(2)
    route = LeastLoaded(both, first_look_s=0.02)
    good.model.version = bad.model.version = 3
    assert (await ask(route, "s")).engine_url == bad.url
    bad.model.faults.append(Fault("status", 500))
    bad.model.version = 2
    assert (await ask(route, "s")).engine_url == good.url
    await asyncio.sleep(0.2)
    assert (await ask(route, "new")).engine_url == good.url
    bad.model.version = 3
    async with asyncio.timeout(5):
        number = 0
        while (await ask(route, f"later{number}")).engine_url != bad.url:
            number += 1
            await asyncio.sleep(0.02)
    assert route.counts()["engines_left_out_now"] == 0
    await route.close()


async def test_when_all_are_left_out_they_are_asked_all_the_same() -> None:
    both = engines(2)
    route = LeastLoaded(both, first_look_s=60.0)
    for engine in both:
        engine.model.faults.append(Fault("status", 500))
    with pytest.raises(EngineError, match="engine_status_500"):
        await ask(route, "s")
    assert (await ask(route, "s")).resends == 0
    await route.close()


async def test_a_request_that_would_be_refused_everywhere_is_sent_once() -> None:
    both = engines(2)
    route = LeastLoaded(both)
    both[0].model.faults.append(Fault("status", 400))
    with pytest.raises(EngineError, match="engine_status_400"):
        await ask(route, "s")
    assert [engine.model.num_requests for engine in both] == [1, 0]
    assert route.counts()["engines_left_out"] == 0
    await route.close()


async def test_a_session_comes_back_to_its_engine_only_by_moving() -> None:
    """Moves are counted against the engine that the last turn came from, also when that one left the set."""
    both = engines(2)
    route = LeastLoaded(both)
    assert (await ask(route, "s")).engine_url == both[0].url
    route.set_engines(both[1:])
    assert (await ask(route, "s")).engine_url == both[1].url
    route.set_engines(both)
    assert (await ask(route, "s")).engine_url == both[1].url
    assert route.counts()["engine_moves"] == 1
    route.forget("s")
    assert (await ask(route, "s")).engine_url == both[0].url
    assert route.counts()["engine_moves"] == 1
    await route.close()


async def test_what_may_serve() -> None:
    (engine,) = engines(1)
    engine.model.version = 4
    assert await may_serve(engine, 4)
    assert not await may_serve(engine, 5)


def test_no_engine_sees_the_same_id_twice() -> None:
    assert [resend_rid("a.0.0", count) for count in range(3)] == ["a.0.0", "a.0.0.r1", "a.0.0.r2"]


@pytest.mark.parametrize(
    ("cause", "refuses"), [("400", True), ("422", True), ("401", True), ("408", False), ("429", False), ("500", False)]
)
def test_which_statuses_are_about_the_request(cause: str, refuses: bool) -> None:
    assert refuses_request(f"engine_status_{cause}") == refuses
