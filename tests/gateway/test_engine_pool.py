"""Choice of engine, failover, interruptions, and what a reply must have."""

from __future__ import annotations

import asyncio
import re
from array import array
from typing import Any

import pytest

from rl360.errors import EngineError
from rl360.gateway.engine_pool import EnginePool, Generation
from rl360.gateway.generation import CODE_BLOCK_REGEX, FENCE_STOPS, mix_seed, read_reply, sampling_params
from rl360.gateway.routes import LeastLoaded
from rl360.types import Sampling, VersionSpan
from tests.gateway.kit import tokenizer_of
from tests.gateway.stub_engine import Fault, StubEngine, StubModel

PROMPT = array("i", [1, 2, 3])


def stub() -> StubModel:
    return StubModel(tokenizer_of(), 3)


async def generate(pool: EnginePool, session: str = "s", max_new_tokens: int = 100) -> Generation:
    return await pool.generate(session, f"{session}.0", PROMPT, Sampling(), max_new_tokens, seed=5)


async def test_a_turn() -> None:
    model = stub()
    generation = await generate(EnginePool(LeastLoaded([StubEngine(model)]), 5))
    (sample,) = model.samples
    assert tuple(generation.token_ids) == sample.ids
    assert tuple(generation.logprobs) == sample.logprobs
    assert generation.version_spans == (VersionSpan(0, 0, len(sample.ids)),)
    assert generation.engine_says[0]["meta_info"]["something_new"] == "kept"
    assert generation.cached_tokens == 3


async def test_an_interrupted_turn_goes_on_from_its_partial_ids() -> None:
    model = stub()
    model.script.extend(["one two three four", "rest"])
    model.faults.extend([Fault("abort", keep=4), Fault("abort", keep=0)])
    generation = await generate(EnginePool(LeastLoaded([StubEngine(model)]), 5))
    first, second, third = model.samples
    assert second.prompt == third.prompt == (*PROMPT, *first.ids)
    assert tuple(generation.token_ids) == (*first.ids, *third.ids)
    assert generation.version_spans == (VersionSpan(0, 0, 4), VersionSpan(2, 4, 4 + len(third.ids)))
    assert generation.interruptions == 2
    assert second.params["max_new_tokens"] == third.params["max_new_tokens"] == 96
    assert len({s.params["sampling_seed"] for s in model.samples}) == 3
    assert generation.finish_type == "stop"


CODE = Sampling(stop_at_code_block=True)
END = Sampling(stop=("END", "never"))


@pytest.mark.parametrize(
    ("sampling", "parts", "text"),
    [
        (CODE, ["```python\nx = 1\n", "y = 2\n```", " and more"], "```python\nx = 1\ny = 2\n```"),
        (CODE, ["```python\nx = 1\n", "y\n```\nthen\n```\nz\n```"], "```python\nx = 1\ny\n```"),
        (CODE, ["```python\nx\n``", "`", " and more"], "```python\nx\n```"),
        (CODE, ["no code", " at all"], "no code at all"),
        (END, ["the E", "ND and more"], "the END"),
        (END, ["the E", "N", "D and more"], "the END"),
        (END, ["the", " END"], "the END"),
        (Sampling(), ["the E", "ND and more"], "the END and more"),
    ],
)
async def test_a_stop_across_an_interruption_ends_the_turn(sampling: Sampling, parts: list[str], text: str) -> None:
    model = stub()
    model.script.extend(parts)
    tokenizer = model.tokenizer
    model.faults.extend(Fault("abort", keep=len(tokenizer.encode(part))) for part in parts[:-1])
    pool = EnginePool(LeastLoaded([StubEngine(model)]), 5, tokenizer.decode)
    generation = await pool.generate("s", "s.0", PROMPT, sampling, 100, seed=5)
    ids = generation.token_ids
    cut = [(i, p, s.version) for s in model.samples for i, p in zip(s.ids, s.logprobs, strict=True)][: len(ids)]
    assert list(zip(ids, generation.logprobs, strict=True)) == [(i, p) for i, p, _ in cut]
    assert tokenizer.decode(ids).startswith(text)
    if sampling != Sampling() and "no" not in parts[0]:
        assert text not in tokenizer.decode(ids[:-1])  # the last token is the first that completes it
    versions = [s.version for s in generation.version_spans for _ in range(s.start, s.end)]
    assert versions == [version for _, _, version in cut]
    assert (generation.version_spans[0].start, generation.version_spans[-1].end) == (0, len(ids))
    assert generation.finish_type == "stop"


async def test_an_interruption_at_the_last_token_is_a_length_stop() -> None:
    model = stub()
    model.script.append("one two three four")
    model.faults.append(Fault("abort", keep=4))
    generation = await generate(EnginePool(LeastLoaded([StubEngine(model)]), 5), max_new_tokens=4)
    assert (generation.finish_type, len(generation.token_ids), model.num_requests) == ("length", 4, 1)


async def test_an_interruption_at_the_end_of_the_turn_ends_it() -> None:
    model = stub()
    model.script.extend(["one two", " three four", "more that nobody asked for"])
    num_second = len(model.tokenizer.encode(" three four"))
    model.faults.extend([Fault("abort", keep=2), Fault("abort", keep=num_second + 1)])  # the end of turn is sampled
    generation = await generate(EnginePool(LeastLoaded([StubEngine(model)]), 5, eos_ids={model.eos}))
    first, second = model.samples
    assert second.ids[-1] == model.eos
    assert tuple(generation.token_ids) == (*first.ids, *second.ids)
    assert generation.version_spans == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 2 + len(second.ids)))
    assert (generation.finish_type, generation.interruptions) == ("stop", 1)


async def test_a_failing_engine_is_left_for_another() -> None:
    broken, good = stub(), stub()
    broken.faults.extend([Fault("status", 500)] * 9)
    pool = EnginePool(LeastLoaded([StubEngine(broken, "stub://0"), StubEngine(good, "stub://1")]), 5)
    assert (await generate(pool)).engine_url == "stub://1"
    assert (await generate(pool)).engine_url == "stub://1"
    assert (broken.num_requests, good.num_requests) == (1, 2)


async def test_the_last_failure_is_the_one_that_is_told() -> None:
    model = stub()
    model.faults.append(Fault("status", 503))
    with pytest.raises(EngineError) as caught:
        await generate(EnginePool(LeastLoaded([StubEngine(model)]), 5))
    assert caught.value.cause == "engine_status_503"


@pytest.mark.parametrize("cause", ["engine_refused", "host_io"])
async def test_a_connection_that_does_not_come_about_is_tried_once_more(cause: str) -> None:
    class Engine(StubEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().generate(*args, **kwargs)
            except EngineError as error:
                raise EngineError(cause, "no connection") from error

    model = stub()
    model.faults.append(Fault("refused"))
    await generate(EnginePool(LeastLoaded([Engine(model)]), 5))
    model.faults.extend([Fault("refused"), Fault("refused")])
    with pytest.raises(EngineError, match=cause):
        await generate(EnginePool(LeastLoaded([Engine(model)]), 5))
    assert model.num_requests == 4


async def test_a_hanging_engine_is_told_to_stop() -> None:
    model = stub()
    model.faults.append(Fault("hang"))
    pool = EnginePool(LeastLoaded([StubEngine(model)]), 0.1)
    with pytest.raises(EngineError, match="engine_timeout"):
        await generate(pool)
    await pool.close()
    assert model.aborted == ["s.0.0"]


async def test_sessions_are_spread_and_stay() -> None:
    models = [stub(), stub()]
    engines = [StubEngine(model, f"stub://{i}") for i, model in enumerate(models)]
    pool = EnginePool(LeastLoaded(engines), 5)
    first = [(await generate(pool, f"s{i}")).engine_url for i in range(4)]
    assert first == ["stub://0", "stub://1", "stub://0", "stub://1"]
    assert [(await generate(pool, f"s{i}")).engine_url for i in range(4)] == first
    pool.forget("s0")
    pool.forget("s2")
    assert (await generate(pool, "s4")).engine_url == "stub://0"


async def test_the_busier_engine_is_not_chosen() -> None:
    engines = [StubEngine(stub(), f"stub://{i}") for i in range(2)]
    engines[0].gate = asyncio.Event()
    pool = EnginePool(LeastLoaded(engines), 5)
    waiting = asyncio.create_task(generate(pool, "s0"))
    await asyncio.sleep(0)
    assert [(await generate(pool, f"s{i}")).engine_url for i in (1, 2, 3)] == ["stub://1"] * 3
    engines[0].gate.set()
    await waiting


def reply(**meta: Any) -> dict[str, Any]:
    rows = [[-0.5, 7, "a"], [-1.0, 8, "b"]]
    base = {"finish_reason": {"type": "stop"}, "output_token_logprobs": rows, "weight_version": "3"}
    return {"output_ids": [7, 8], "text": "ab", "meta_info": {**base, **meta}}


def test_versions_stamped_or_in_spans() -> None:
    assert read_reply(reply(), "u").version_spans == (VersionSpan(3, 0, 2),)
    rows = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    assert read_reply(reply(weight_versions=rows), "u").version_spans == (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2))


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"weight_version": "default"}, "weight_version is 'default'; expected a number"),
        ({"weight_versions": [{"version": 1, "end": 1}]}, "covers 1 of 2 tokens"),
        ({"output_token_logprobs": []}, "output_ids is empty"),
        (
            {"finish_reason": {"type": "abort", "status_code": 400, "message": "too long"}},
            "engine_status_400: u: too long",
        ),
    ],
)
def test_a_reply_that_cannot_be_trained_on(meta: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        read_reply(reply(**meta), "u")


def test_sampling_is_the_specs() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, stop=("END",), stop_at_code_block=True)
    common = {
        "max_new_tokens": 10,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "sampling_seed": 4,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    assert sampling_params(sampling, 10, 4) == {**common, "stop": ["END"], "stop_regex": CODE_BLOCK_REGEX}
    assert sampling_params(sampling, 10, 4, to_next_fence=True) == {**common, "stop": ["END", *FENCE_STOPS]}


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("```python\nx = 1\n```", True),
        ("Sure:\n```\nx\n```\n", True),
        ("```python\nx = 1\n", False),
        ("use ```x``` inline", False),
        ("```python", False),
    ],
)
def test_when_a_code_block_is_closed(text: str, closed: bool) -> None:
    assert bool(re.search(CODE_BLOCK_REGEX, text)) == closed


def test_seeds_depend_on_every_part() -> None:
    seeds = {mix_seed(seed, turn) for seed in range(30) for turn in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert mix_seed(1, 23) != mix_seed(12, 3)


async def test_an_engine_that_leaves_takes_no_new_request_and_a_newcomer_does() -> None:
    models = [stub(), stub()]
    engines = [StubEngine(model, f"stub://{index}") for index, model in enumerate(models)]
    pool = EnginePool(LeastLoaded(engines), 5)
    first = await generate(pool)
    left = next(engine for engine in engines if engine.url == first.engine_url)
    stayed = next(engine for engine in engines if engine.url != first.engine_url)
    pool.set_engines([stayed])
    assert (await generate(pool)).engine_url == stayed.url
    assert left.model.num_requests == 1
    pool.set_engines([stayed, left])
    assert (await generate(pool)).engine_url == stayed.url  # a session stays where its cache is
    assert (await generate(pool, "another")).engine_url == left.url


async def test_an_empty_serving_set_is_waited_for() -> None:
    model = stub()
    pool = EnginePool(LeastLoaded([]), 5)
    waiting = asyncio.create_task(generate(pool))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pool.set_engines([StubEngine(model)])
    assert (await waiting).token_ids == list(model.samples[0].ids)
    with pytest.raises(EngineError, match="no engine serves") as caught:
        await generate(EnginePool(LeastLoaded([]), 0.05))
    assert caught.value.cause == "engine_timeout"


async def test_the_only_engine_dies_is_dropped_and_replaced_within_the_turn() -> None:
    dead, new = stub(), stub()
    dead.faults.extend([Fault("refused")] * 9)
    pool = EnginePool(LeastLoaded([StubEngine(dead, "stub://dead")]), 5)
    turn = asyncio.create_task(generate(pool))
    await asyncio.sleep(0.05)  # refused once, about to ask again
    pool.set_engines([])
    await asyncio.sleep(0.3)
    assert not turn.done()
    pool.set_engines([StubEngine(new, "stub://new")])
    assert (await turn).engine_url == "stub://new"
    assert dead.num_requests == 1
