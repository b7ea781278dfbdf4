"""Turns that end with a code block and are asked for fence by fence: the same tokens as with the block's expression."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl360.errors import EngineError
from rl360.gateway import engine_pool
from rl360.gateway.embedded.request import new_request
from rl360.gateway.embedded.sampling import SamplingParams
from rl360.gateway.engine_pool import EnginePool, Generation, first_stop
from rl360.gateway.generation import CODE_BLOCK_REGEX, FENCE_STOPS, LONGEST_BY_EXPRESSION
from rl360.gateway.replies import engine_extra
from rl360.gateway.routes import LeastLoaded
from rl360.types import Sampling, VersionSpan
from tests.gateway.kit import tokenizer_of
from tests.gateway.stub_engine import StubEngine, StubModel

PROMPT = array("i", [7, 7, 7])
CODE = Sampling(stop_at_code_block=True)
EOS = "<eos>"
LONG = 1000


class Words:
    """A tokenizer whose tokens are the pieces that it meets."""

    def __init__(self) -> None:
        self.pieces = [EOS]
        self.decoded: list[int] = []  # how many ids, of each call

    def encode(self, pieces: Iterable[str]) -> list[int]:
        pieces = list(pieces)
        self.pieces += [piece for piece in dict.fromkeys(pieces) if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in pieces]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded.append(len(ids))
        return "".join(self.pieces[i] for i in ids)


class Writer(StubEngine):
    """An engine that has one answer for the prompt, and goes on in it for a prompt that repeats its beginning.

    Args:
        pieces: its tokens; an end of turn follows, and to be asked for more is an error.
        aborts: after how many tokens of the answer it aborts; twice for two aborts in a row.
        new_weights: after how many tokens of the answer its version goes up.
        like_sglang: its length cap goes before stops, and it looks for strings in the last two tokens only. Else it
            stops as the embedded engine does.
        tells: what it matched.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        aborts: Sequence[int] = (),
        new_weights: Sequence[int] = (),
        like_sglang: bool = False,
        tells: bool = True,
    ) -> None:
        self.words = Words()
        self.ids = self.words.encode([*pieces, EOS])
        super().__init__(StubModel(tokenizer_of(), 3), "writer://0")
        self._aborts = Counter(aborts)
        self._new_weights = new_weights
        self._like_sglang = like_sglang
        self._tells = tells
        self.requests: list[tuple[str, Mapping[str, Any]]] = []  # rid and parameters
        self.finishes: list[str] = []

    def version_at(self, index: int) -> int:
        return sum(after <= index for after in self._new_weights)

    def aborts_at(self, length: int) -> bool:
        if not self._aborts[length]:
            return False
        self._aborts[length] -= 1
        return True

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], rid: str
    ) -> Mapping[str, Any]:
        self.requests.append((rid, sampling_params))
        if self.gate is not None:
            await self.gate.wait()
        had = len(input_ids) - len(PROMPT)
        assert list(input_ids) == [*PROMPT, *self.ids[:had]]
        assert had < len(self.ids), "asked to go on behind its end of turn"
        assert sampling_params["max_new_tokens"] > 0
        params = SamplingParams.from_json(sampling_params)
        request = new_request(
            input_ids,
            params,
            rid,
            lambda: None,
            own_seed=int,
            vocab_size=1000,
            max_tokens=10_000,
            end_tokens=frozenset(self.words.encode([EOS])),
            tokenizer=self.words,
        )
        aborted = self.aborts_at(had)
        while not aborted and request.finish_reason is None:
            index = had + len(request.output_ids)
            request.append(self.ids[index], -(index + 1) / 8, self.version_at(index))
            if self._like_sglang:
                request.finish_reason = self._finish_of_sglang(request.output_ids, params)
            aborted = self.aborts_at(index + 1)
        if aborted:
            request.finish_reason = {"type": "abort", "message": "by the test"}
        assert request.finish_reason is not None
        if not self._tells:
            request.finish_reason.pop("matched", None)
        self.finishes.append(request.finish_reason["type"])
        return request.reply(self.version_at(had), self.words, True)

    def _finish_of_sglang(self, ids: list[int], params: SamplingParams) -> dict[str, Any] | None:
        assert params.max_new_tokens is not None
        if len(ids) >= params.max_new_tokens:
            return {"type": "length", "length": len(ids)}
        tail = self.words.decode(ids if params.stop_regex else ids[-2:])
        for stop in params.stop:
            if stop in tail:
                return {"type": "stop", "matched": stop}
        for pattern in params.stop_regex:
            if re.search(pattern, tail):
                return {"type": "stop", "matched": pattern}
        return {"type": "stop", "matched": ids[-1]} if self.words.pieces[ids[-1]] == EOS else None


def pool_of(engine: Writer, knows_eos: bool = True, split_above: int | None = LONGEST_BY_EXPRESSION) -> EnginePool:
    eos_ids = engine.words.encode([EOS]) if knows_eos else ()
    return EnginePool(LeastLoaded([engine]), 5, engine.words.decode, eos_ids, split_above)


async def turn(engine: Writer, sampling: Sampling = CODE, most: int = LONG, **pool: Any) -> Generation:
    return await pool_of(engine, **pool).generate("s", "s.0", PROMPT, sampling, most, seed=5)


def expected(pieces: Sequence[str], sampling: Sampling, most: int) -> tuple[int, str]:
    """(tokens of the turn, why it ends), read off the text."""
    for length in range(1, most + 1):
        text = "".join([*pieces, EOS][:length])
        if re.search(CODE_BLOCK_REGEX, text) or any(stop in text for stop in sampling.stop):
            return length, "stop"
        if length > len(pieces):
            return length, "stop"  # the end of turn
    return most, "length"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause would outlast the turn."""
    monkeypatch.setattr(engine_pool, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(engine_pool, "LONGEST_PAUSE_S", 1000.0)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("like_sglang", [False, True])
@pytest.mark.parametrize(
    ("pieces", "num_tokens", "num_requests"),
    [
        (["Sure:\n", "```", "python", "\n", "x = 1", "\n", "```", " and more"], 7, 2),
        (["```", "python", "\n", "x = 1", "\n", "```", " and more"], 6, 2),
        (["```python\n", "x = 1\n", "```", "more"], 3, 2),  # the rest of the line is in the fence's token
        (["```python\n", "x\n``", "`", "more"], 3, 2),
        (["```", "\n", "x", "\n```\nmore", "more"], 4, 2),  # more behind the fence in the token that closes the block
        (["a ", "```x\ny```", " b"], 2, 1),  # all of the block in one token
        (["````", "sh\n", "ls\n", "````", "more"], 4, 2),
        (["use ", "```", "x", "```", " or ", "```y```", " in a line"], 8, 4),  # the end of turn is the eighth
        (["use ", "```x```", "\n", "ls\n", "```", "more"], 5, 2),  # what looks like a closed line opens a block
        (["no code", " at all"], 3, 1),
        (["an open end ", "```"], 3, 2),
    ],
)
async def test_a_turn_by_fences(pieces: list[str], num_tokens: int, num_requests: int, like_sglang: bool) -> None:
    engine = Writer(pieces, like_sglang=like_sglang)
    assert expected(pieces, CODE, LONG) == (num_tokens, "stop")
    generation = await turn(engine)
    assert generation.token_ids == engine.ids[:num_tokens]
    assert generation.logprobs == [-(index + 1) / 8 for index in range(num_tokens)]
    assert (generation.finish_type, generation.interruptions) == ("stop", 0)
    assert (len(engine.requests), len(generation.engine_says)) == (num_requests, num_requests)
    assert generation.version_spans == (VersionSpan(0, 0, num_tokens),)
    assert engine_extra(generation)["versions"] == [0]
    assert [rid for rid, _ in engine.requests] == [f"s.0.{part}" for part in range(num_requests)]
    assert {params["sampling_seed"] for _, params in engine.requests} == {5}  # engines draw by seed and place
    assert all(params["stop"] == [*FENCE_STOPS] and "stop_regex" not in params for _, params in engine.requests)


async def test_a_fence_that_the_engine_misses_costs_tokens_and_changes_none() -> None:
    pieces = ["```python\n", "x\n", "`", "`", "`", "more", "```", "and more"]
    engine = Writer(pieces, like_sglang=True)
    generation = await turn(engine)
    assert (generation.token_ids, generation.finish_type) == (engine.ids[:5], "stop")
    assert generation.version_spans == (VersionSpan(0, 0, 5),)
    opening = ["`", "`", "`", "sh\n", "ls\n", "```", "more"]
    engine = Writer(opening, like_sglang=True)
    assert ((await turn(engine)).token_ids, len(engine.requests)) == (engine.ids[:6], 1)


@pytest.mark.parametrize(("most", "by_fences"), [(256, False), (257, True)])
async def test_a_short_turn_is_asked_for_with_the_expression(most: int, by_fences: bool) -> None:
    engine = Writer(["```", "\n", "x", "\n", "```", "more"])
    assert (await turn(engine, most=most)).token_ids == engine.ids[:5]
    asked = [{key: params[key] for key in params if key.startswith("stop")} for _, params in engine.requests]
    assert asked == ([{"stop": [*FENCE_STOPS]}] * 2 if by_fences else [{"stop_regex": CODE_BLOCK_REGEX}])
    assert [params["max_new_tokens"] for _, params in engine.requests] == ([257, 256] if by_fences else [256])


async def test_without_a_tokenizer_it_is_the_expression() -> None:
    engine = Writer(["```", "\n", "x", "\n", "```", "more"])
    generation = await EnginePool(LeastLoaded([engine]), 5).generate("s", "s.0", PROMPT, CODE, LONG, seed=5)
    assert (len(generation.token_ids), len(engine.requests)) == (5, 1)


async def test_without_a_code_block_no_fence_is_a_stop() -> None:
    engine = Writer(["```", "\n", "x", "END", "more"])
    assert (await turn(engine, Sampling(stop=("END",)))).token_ids == engine.ids[:4]
    assert [params["stop"] for _, params in engine.requests] == [["END"]]


@pytest.mark.parametrize(
    ("pieces", "most", "finish", "of_sglang"),
    [
        (["x", "```", "y"], 2, "length", "length"),  # a fence that closes nothing
        (["```\n", "x", "```", "y"], 3, "stop", "length"),  # one that does: as with the expression
        (["```\n", "x", "```", "y"], 2, "length", "length"),
        (["```\n", "x"], 3, "stop", "length"),  # the end of turn
    ],
)
async def test_the_length_cap_at_a_fence(pieces: list[str], most: int, finish: str, of_sglang: str) -> None:
    for above in (0, None):  # by fences, by the expression
        for like_sglang, says in ((False, finish), (True, of_sglang)):
            engine = Writer(pieces, like_sglang=like_sglang)
            generation = await turn(engine, most=most, split_above=above)
            assert (generation.token_ids, generation.finish_type) == (engine.ids[:most], says)


@pytest.mark.parametrize(
    ("stop", "pieces", "num_tokens"),
    [
        ("```", ["a", "```", "\n"], 2),
        ("`", ["a", "`", "b"], 2),
        ("```\n", ["a", "```", "\n", "b"], 3),  # begins with the fence: only the joined text holds it
        ("x```", ["x", "```", "y"], 2),
        ("END", ["```\n", "EN", "D", "```"], 3),
        ("END", ["```\n", "b", "```", "END"], 3),
    ],
)
@pytest.mark.parametrize("like_sglang", [False, True])
async def test_stops_of_ones_own(stop: str, pieces: list[str], num_tokens: int, like_sglang: bool) -> None:
    engine = Writer(pieces, like_sglang=like_sglang)
    generation = await turn(engine, Sampling(stop=(stop,), stop_at_code_block=True))
    assert (generation.token_ids, generation.finish_type) == (engine.ids[:num_tokens], "stop")
    assert all(params["stop"] == [stop, *FENCE_STOPS] for _, params in engine.requests)


@pytest.mark.parametrize(("tells", "knows_eos"), [(True, True), (True, False), (False, True)])
async def test_an_end_of_turn_behind_a_fence_is_one(tells: bool, knows_eos: bool) -> None:
    """Whether the engine says that it was a token, or the pool knows it. The fence is one that the engine missed."""
    engine = Writer(["`", "`", "`", "x"], like_sglang=True, tells=tells)
    generation = await turn(engine, knows_eos=knows_eos)
    assert (generation.token_ids, generation.finish_type, len(engine.requests)) == (engine.ids, "stop", 1)


async def test_an_engine_that_does_not_say_what_it_matched() -> None:
    engine = Writer(["```", "\n", "x", "```", "more"], tells=False)
    assert ((await turn(engine)).token_ids, len(engine.requests)) == (engine.ids[:4], 2)
    engine = Writer(["no code"], tells=False)
    assert ((await turn(engine, knows_eos=False)).token_ids, len(engine.requests)) == (engine.ids, 1)


async def test_interruptions_are_counted_and_fences_are_not() -> None:
    pieces = ["a", "```", "py\n", "x", "``", "`", "more"]
    engine = Writer(pieces, aborts=[1, 3, 3, 5], new_weights=[1, 4])
    generation = await turn(engine)
    assert generation.token_ids == engine.ids[:6]
    assert generation.interruptions == 4
    assert generation.version_spans == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 4), VersionSpan(2, 4, 6))
    assert engine.finishes == ["abort", "stop", "abort", "abort", "abort", "stop"]
    assert generation.finish_type == "stop"


async def test_an_interruption_at_the_token_that_closes_the_block_ends_the_turn() -> None:
    engine = Writer(["```\n", "x", "```", "more"], aborts=[3])
    generation = await turn(engine)
    assert (generation.token_ids, generation.finish_type) == (engine.ids[:3], "stop")
    assert (generation.interruptions, len(engine.requests)) == (0, 2)


async def test_a_text_of_fences_is_no_request_for_each() -> None:
    engine = Writer([" ```"] * 40)
    generation = await turn(engine)
    assert (generation.token_ids, generation.interruptions) == (engine.ids, 0)
    sent = [("stop_regex" in params, "stop" in params) for _, params in engine.requests]
    assert sent == [(False, True)] * engine_pool.MOST_FENCES + [(True, False)]
    # Each fence is looked at in the text so far and in its part, not in every prefix.
    engine.words.decoded.clear()
    assert first_stop(engine.ids, CODE, engine.words.decode) is None
    assert engine.words.decoded == [41]


def test_a_stop_at_the_last_token_is_found_at_once() -> None:
    words = Words()
    ids = words.encode(["```\n", *"x" * 500, "```"])
    assert first_stop(ids, CODE, words.decode) == 502
    assert words.decoded == [502, 501]
    assert first_stop([*ids, *ids], CODE, words.decode) == 502


async def test_where_requests_are_drained_a_turn_is_one_request_and_one_version() -> None:
    engine = Writer(["```", "\n", "x", "```", "more"])
    generation = await turn(engine, split_above=None)
    assert generation.token_ids == engine.ids[:4]
    ((_, params),) = engine.requests
    assert params["stop_regex"] == CODE_BLOCK_REGEX
    assert "stop" not in params


class Short(Writer):
    """With SGLang's context of 400 tokens, of which it keeps six from prompts and two from answers."""

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], rid: str
    ) -> Mapping[str, Any]:
        if len(input_ids) >= 394:
            raise EngineError("engine_status_400", f"Input length ({len(input_ids)} tokens) exceeds the maximum")
        left = min(sampling_params["max_new_tokens"], 398 - len(input_ids))
        return await super().generate(input_ids, {**sampling_params, "max_new_tokens": left}, rid)


@pytest.mark.parametrize("fence_ends", range(390, 399))
async def test_a_fence_behind_which_the_context_ends_is_no_error(fence_ends: int) -> None:
    engine = Short([*["x"] * (fence_ends - len(PROMPT) - 1), " ```", *["y"] * 20], like_sglang=True)
    generation = await turn(engine, most=400 - len(PROMPT))
    assert generation.finish_type == "length"
    whole = 398 if fence_ends < 394 else fence_ends
    assert generation.token_ids == engine.ids[: whole - len(PROMPT)]


async def test_a_prompt_that_is_refused_elsewhere_is_one() -> None:
    with pytest.raises(EngineError, match="exceeds"):  # there was room for more
        await turn(Short([*["x"] * 391, " ```", "y"]), most=LONG)
    engine = Short(["x"])
    with pytest.raises(EngineError, match="exceeds"):  # nothing has been sampled
        await pool_of(engine).generate("s", "s.0", array("i", [*PROMPT, *[7] * 391]), CODE, 6, seed=5)


async def test_a_hold_between_two_parts_waits_for_the_release() -> None:
    """What goes on under new weights says so; nobody aborted anything."""
    engine = Writer(["```", "\n", "x", "```", "more"], new_weights=[1])
    engine.gate = asyncio.Event()
    pool = pool_of(engine)
    running = asyncio.create_task(pool.generate("s", "s.0", PROMPT, CODE, LONG, seed=5))
    await asyncio.sleep(0.01)
    pool.hold()
    engine.gate.set()
    assert await pool.idle(1.0) == 0
    await asyncio.sleep(0.1)
    assert len(engine.requests) == 1
    pool.release()
    generation = await running
    assert (generation.token_ids, generation.interruptions) == (engine.ids[:4], 0)
    assert generation.version_spans == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 4))


PIECES = ["`", "``", "```", "````", "```python\n", "\n", "x = 1", " ```", "```\n", "```x```", "EN", "D"]
STOPS: list[tuple[str, ...]] = [(), ("END",), ("```",), ("```\n",), ("`\nx", "D")]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=24),
    most=st.integers(1, 30),
    stop=st.sampled_from(STOPS),
    aborts=st.lists(st.integers(0, 25), max_size=5),
    new_weights=st.lists(st.integers(1, 25), max_size=3),
    most_fences=st.integers(0, 5),
    by_fences=st.booleans(),
    like_sglang=st.booleans(),
)
@example(["```\n", "x = 1", "```"], 30, (), [3], [], 5, True, False)
@example(["```", "\n", "`", "`", "`"], 30, (), [3, 4], [3], 5, True, True)
def test_any_text_ends_where_its_first_stop_does(
    pieces: list[str],
    most: int,
    stop: tuple[str, ...],
    aborts: list[int],
    new_weights: list[int],
    most_fences: int,
    by_fences: bool,
    like_sglang: bool,
) -> None:
    """By fences or by the expression, wherever the engine aborts and gets new weights."""
    sampling = Sampling(stop=stop, stop_at_code_block=True)
    engine = Writer(pieces, aborts, new_weights, like_sglang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_pool, "MOST_FENCES", most_fences)
        patch.setattr(engine_pool, "FIRST_PAUSE_S", 0.0)
        generation = asyncio.run(turn(engine, sampling, most, split_above=0 if by_fences else None))
    length, finish = expected(pieces, sampling, most)
    assert generation.token_ids == engine.ids[:length]
    assert generation.logprobs == [-(index + 1) / 8 for index in range(length)]
    if length < most:  # at the cap, engines differ in what goes before
        assert generation.finish_type == finish
    assert generation.finish_type in (finish, "length")
    assert generation.interruptions == engine.finishes[:-1].count("abort")
    assert len(generation.engine_says) == len(engine.requests)
    spans = generation.version_spans
    versions = [span.version for span in spans for _ in range(span.start, span.end)]
    assert versions == [engine.version_at(index) for index in range(length)]
    assert len(set(versions)) == len(spans)
    assert len({rid for rid, _ in engine.requests}) == len(engine.requests)
