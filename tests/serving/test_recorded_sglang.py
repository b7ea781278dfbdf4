"""Our clients against what a real SGLang 0.5.16 answered on an H200, and the embedded engine's answers beside it.

Weights from the recorder, by handles and by a group, are checked in the real server's recording where it has them, and
in one of the embedded engine that is made here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.h200 import record_sglang
from benchmarks.h200.record_sglang import GROUP, HANDLES, NOTE
from rl360.errors import EngineError
from rl360.gateway.engine_pool import EnginePool
from rl360.gateway.routes import LeastLoaded
from rl360.models.loading import load_decoder
from rl360.types import Sampling
from rl360.weight_sync.buckets import bucketed
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.sources import BucketSpec, TensorSource
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import BroadcastTransport, HandleTransport
from tests.serving.replay import MEMORY, RECORDINGS, Replay, serve
from tests.tiny_model import write_tiny_llama

RECORDING = RECORDINGS / "sglang-0.5.16.json"
IDS = [1, 2, 3]


# Fields whose values are compared where both engines answer; what is sampled, when, and how fast differs.
VALUES = ("success", "message", "status", "num_paused_requests", "new_version", "weight_version")
META = ("weight_version", "prompt_tokens", "num_retractions")
# Of a request, what one run calls its own, or what is the model's.
OWN = {"rid", "input_ids", "serialized_named_tensors", "names", "dtypes", "shapes"}
OWN |= {"group_name", "master_port", "backend"}
# Refused by both, for reasons that each words in its own way.
OWN_WORDS = ("/nowhere", "gently", "master_address")


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return Replay(RECORDING).rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def embedded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the recorder writes down of the embedded engine: the same calls in the same situations."""
    folder = tmp_path_factory.mktemp("embedded")
    words = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--logs", str(folder / "logs")]
    words += ["--command", f"{sys.executable} -m rl360.gateway.embedded.serve"]
    words += ["--extra", "--threads 1 --kv-cache-gib 0.05", "--out", str(folder / "embedded.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_sglang, "SETTLE_S", 0.1)
        record_sglang.main(words)
    return folder / "embedded.json"


@pytest.fixture(params=["sglang", "embedded"])
def recording(request: pytest.FixtureRequest) -> Path:
    path: Path = RECORDING if request.param == "sglang" else request.getfixturevalue("embedded")
    return path


async def test_a_generation_is_read_with_every_field_that_training_needs() -> None:
    async with serve(RECORDING) as (url, replay):
        engine = WeightEngine(url)
        params = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 7}
        reply = await engine.generate(IDS, params, "mine")
        assert reply["meta_info"]["id"] == "mine"
        assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] == 4
        assert reply["meta_info"]["weight_version"] == "0"
        sent = replay.calls[-1][1]
        assert sent["return_logprob"] is True
        assert sent["input_ids"] == IDS
        await engine.close()


async def test_a_whole_turn_through_the_pool() -> None:
    async with serve(RECORDING) as (url, _):
        pool = EnginePool(LeastLoaded([WeightEngine(url)]), 10)
        turn = await pool.generate("s", "s.0", array("i", IDS), Sampling(max_new_tokens=4), 4, seed=1)
        assert len(turn.token_ids) == len(turn.logprobs) == 4
        assert [(span.version, span.start, span.end) for span in turn.version_spans] == [(0, 0, 4)]
        await pool.close()


async def test_information_and_health() -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url)
        info = await engine.info()
        assert info["weight_version"] == "0"
        assert await engine.tensor_parallel_size() == 1
        assert await engine.hash_kind() == "gpu_kernel"
        assert await engine.health()
        await engine.close()


async def test_a_folder_that_is_not_there_is_refused_with_its_reason() -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url)
        with pytest.raises(EngineError, match="/nowhere") as caught:
            await engine.load(Path("/nowhere"), 9)
        assert caught.value.cause == "engine_status_400"
        await engine.close()


async def test_an_unknown_sampling_parameter_is_an_error() -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url)
        with pytest.raises(EngineError) as caught:
            await engine.generate(IDS, {"no_such_field": 1}, "bad")
        assert caught.value.cause.startswith("engine_status_")
        await engine.close()


async def test_a_pause_holds_generations_back() -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url)
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(IDS, {"max_new_tokens": 4, "temperature": 0.0}, "later"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert await engine.health()
        await engine.flush()
        await engine.resume()
        assert (await waiting)["output_ids"]
        await engine.abort("nobody")
        await engine.close()


async def test_what_was_not_recorded_is_not_made_up() -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url)
        with pytest.raises(EngineError, match="is not in the recording") as caught:
            await engine.receive(BucketSpec(0, ("a",), ("bfloat16",), ((1,),), 2), "g")
        assert caught.value.cause == "engine_status_501"
        await engine.close()


async def test_a_turn_that_a_pause_ends_goes_on_with_the_ids_that_it_had(real: list[dict[str, Any]]) -> None:
    aborted = next(row for row in real if row["situation"] == "running into a pause, abort")["reply"]
    async with serve(RECORDING) as (url, replay):
        pool = EnginePool(LeastLoaded([WeightEngine(url)]), 10)
        engine = WeightEngine(url)
        turn = asyncio.create_task(
            pool.generate("s", "s.0", array("i", IDS), Sampling(max_new_tokens=1500), 1500, seed=1)
        )
        await replay.ends_later.wait()
        await engine.pause()
        await engine.flush()
        await engine.set_version(5)
        await engine.resume()
        found = await turn
        again = replay.calls[-1][1]
        had = aborted["output_ids"]
        assert len(had) > 10
        assert again["input_ids"] == [*IDS, *had]
        assert again["sampling_params"]["max_new_tokens"] == 1500 - len(had)
        assert found.token_ids[: len(had)] == had
        assert found.interruptions == 1
        assert [(s.version, s.start, s.end) for s in found.version_spans] == [
            (4, 0, len(had)),
            (5, len(had), len(had) + 4),
        ]
        await engine.close()
        await pool.close()


@pytest.mark.parametrize(("mode", "flushed"), [("abort", True), ("retract", False), ("in_place", False)])
async def test_the_cache_is_flushed_only_in_a_pause_that_has_ended_requests(mode: str, flushed: bool) -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url, pause_mode=mode)
        await engine.pause()
        assert await engine.health()
        assert (await engine.checksums())[0][0].hashes
        if flushed:
            await engine.flush()
        else:
            with pytest.raises(EngineError, match="Flush cache failed") as caught:
                await engine.flush()
            assert caught.value.cause == "engine_status_400"
        await engine.close()


async def test_memory_changes_hands_and_the_weights_are_the_same_afterwards(real: list[dict[str, Any]]) -> None:
    async with serve(RECORDING) as (url, replay):
        engine = WeightEngine(url)
        before = await engine.checksums()
        await engine.pause()
        await engine.flush(10.0)
        await engine.release_memory(("kv_cache", "weights"))
        assert replay.situation == MEMORY
        assert await engine.health()
        assert await engine.tensor_parallel_size() == 1
        await engine.resume_memory(("weights",))
        await engine.load_unnamed(Path("MODEL"))
        assert await engine.checksums() == before
        await engine.set_version(6)
        await engine.resume_memory(("kv_cache",))
        await engine.flush(10.0)
        await engine.resume()
        assert (await engine.generate(IDS, {"max_new_tokens": 4, "temperature": 0.0}, "after"))["output_ids"]
        assert replay.calls[2][0] == "POST /flush_cache?timeout=10"
        await engine.close()
    released, weights, cache = (row["used_mib"] for row in real if "used_mib" in row)
    gave_mib = released["before"][0] - released["after"][0]
    assert gave_mib > 1000  # a server whose memory saver was not loaded gives nothing back, and says nothing
    took_mib = sum(change["after"][0] - change["before"][0] for change in (weights, cache))
    assert took_mib == pytest.approx(gave_mib, abs=64)


def test_greedy_logprobs_after_the_hand_over_are_those_of_an_empty_cache(real: list[dict[str, Any]]) -> None:
    """Bit for bit. Behind a cached prefix they are others: a step over one token rounds otherwise than one over six."""
    greedy = [row["reply"]["meta_info"] for row in _greedy(real) if row["situation"] not in (HANDLES, GROUP)]
    fresh = [meta["output_token_logprobs"] for meta in greedy if meta["cached_tokens"] == 0]
    cached = [meta["output_token_logprobs"] for meta in greedy if meta["cached_tokens"]]
    assert len(fresh) == 2
    assert fresh[0] == fresh[1]
    assert len(cached) == 4
    for rows in cached:
        assert [row[1] for row in rows] == [row[1] for row in fresh[0]]
        # By how much is another thing in each recording of bf16: 0.05 nats, 0.12.
        assert 0 < max(abs(a[0] - b[0]) for a, b in zip(rows, fresh[0], strict=True)) < 0.2


async def test_a_malformed_handle_ends_the_server() -> None:
    async with serve(RECORDING) as (url, _):
        engine = WeightEngine(url)
        assert await engine.health()
        with pytest.raises(EngineError) as caught:
            await engine.take_handles(["bm8="])
        assert caught.value.cause == "engine_refused"
        assert not await engine.health()
        await engine.close()


def test_a_recording_names_no_folder_of_its_machine(real: list[dict[str, Any]]) -> None:
    text = json.dumps(real)
    assert "/tmp/" not in text
    assert "/home/" not in text
    row = {"path": "/data/m/config.json", "trace": ['File "/opt/py/site/sglang/srt/x.py", line 3'], "n": 1}
    assert record_sglang.without_folders(row, "/data/m") == {
        "path": "MODEL/config.json",
        "trace": ['File "SITE/sglang/srt/x.py", line 3'],
        "n": 1,
    }


@pytest.mark.parametrize("situation", [HANDLES, GROUP])
async def test_a_sync_of_ours_is_the_recorded_calls(situation: str, recording: Path, model: Path) -> None:
    """One by one, with the same fields, to the reply that each had."""
    recorded = [row for row in _sent(recording, situation) if row["call"] != "POST /generate"]
    async with serve(recording) as (url, replay):
        trainer: Any = _Trainer(model, doubled=situation == HANDLES)
        bucket_bytes = record_sglang.two_buckets([p.nbytes for p in trainer.decoder.parameters()])
        way = HandleTransport(bucket_bytes) if situation == HANDLES else BroadcastTransport(bucket_bytes)
        sync = FleetSync(FixedSet([url]), way, WeightEngine)
        report = await asyncio.to_thread(sync.sync, trainer, 9)
        assert report.confirmed == (url,)
        calls = [(call, body) for call, body in replay.calls if call != "GET /server_info"]
        assert [call for call, _ in calls] == [row["call"] for row in recorded]
        assert [set(body or ()) for _, body in calls] == [set(row["request"] or ()) for row in recorded]
        engine = WeightEngine(url)
        assert (await engine.generate(IDS, record_sglang.GREEDY, "after"))["meta_info"]["weight_version"] == "9"
        for name in [body["group_name"] for call, body in calls if "/init_weights_update_group" in call]:
            with pytest.raises(EngineError, match="does not exist"):  # it was ended
                await engine.leave(name)
        await engine.close()


class _Trainer(record_sglang.Weights):
    """Its rank of a group is alone there: a recording receives nothing."""

    def __init__(self, folder: Path, doubled: bool) -> None:
        super().__init__(load_decoder(folder).requires_grad_(False))
        if doubled:
            self.decoder.get_parameter(record_sglang.DOUBLED).mul_(2)
        self.version = 9

    def weight_sources(self) -> list[TensorSource]:
        class Alone(TensorSource):
            def join(self, name: str, port: int, world_size: int, backend: str) -> None: ...
            def broadcast(self, index: int, name: str) -> None: ...

        return [Alone(self.decoder.named_parameters)]


def test_sent_weights_are_the_ones_that_generate(recording: Path) -> None:
    """Doubled: the same ids, other logprobs. As they were: the same hash, the same logprobs to the last bit."""

    def found(situation: str) -> tuple[str, list[int], list[float]]:
        rows = _sent(recording, situation)
        hashes = [row["reply"]["per_engine_checksum"] for row in rows if row["call"] == "POST /weights_checker"]
        logprobs = _greedy(rows)[-1]["reply"]["meta_info"]["output_token_logprobs"]
        return hashes[-1], [row[1] for row in logprobs], [row[0] for row in logprobs]

    before = found(MEMORY)
    doubled = found(HANDLES)
    assert doubled[0] != before[0]
    assert doubled[1] == before[1]
    assert all(more != less for more, less in zip(doubled[2], before[2], strict=True))
    assert found(GROUP) == before


def test_two_buckets_are_two() -> None:
    assert record_sglang.two_buckets([3, 1, 1, 4]) == 5  # 3 and 6, 4 and 5, or 5 and 4
    for sizes in ([1, 1], [9, 1, 1], [1, 1, 9], [28, 1, 4, 4, 4, 4, 4, 4, 1]):
        named = [(str(at), torch.zeros(size, dtype=torch.uint8)) for at, size in enumerate(sizes)]
        assert len(list(bucketed(named, record_sglang.two_buckets(sizes)))) == 2


def test_long_fields_of_a_request_are_counted() -> None:
    row = {
        "input_ids": [3] * 200_000,
        "names": ["n"] * 21,
        "serialized_named_tensors": ["x" * 5000],
        "load_format": "f",
    }
    assert record_sglang.shortened(row) == {
        "input_ids": "200000 ids",
        "names": "21 names",
        "serialized_named_tensors": ["5000 characters"],
        "load_format": "f",
    }
    short = {"input_ids": [1, 2], "shapes": [[1, 2]], "serialized_named_tensors": ["bm8="], "sampling_params": {"n": 1}}
    assert record_sglang.shortened(short) == short


def test_the_embedded_engine_answers_as_the_real_one(embedded: Path, real: list[dict[str, Any]]) -> None:
    """The recorder, on the embedded engine: the same calls in the same situations, compared one by one."""
    theirs = _in_order(row for row in real if row["situation"] != "last" and row["call"] != NOTE)
    mine = Replay(embedded).rows
    assert not [row for row in mine if row["call"] == NOTE]
    situations = {key[0] for key in theirs}  # a recording may be without weights from the recorder
    assert {row["situation"] for row in mine} - situations <= {HANDLES, GROUP, "last"}
    ours = _in_order(row for row in mine if row["situation"] in situations)
    assert theirs.keys() == ours.keys()
    compared: Counter[str] = Counter()
    for key, expected in theirs.items():
        _compare(key, expected, ours[key], compared)
    # The malformed weight call, which ends SGLang's server, is refused here.
    assert [row["status"] for row in mine if row["situation"] == "last"] == [400, 200, 400, 200]
    assert compared["finish_reason"] > 12
    assert compared["message"] > 15
    assert compared["text"] > 10


def _sent(recording: Path, situation: str) -> list[dict[str, Any]]:
    """What was recorded in a situation; a test is skipped where the recorder left that out."""
    rows = [row for row in Replay(recording).rows if row["situation"] == situation]
    note = next((row["reply"] for row in rows if row["call"] == NOTE), "")
    if not rows or note.startswith("left out"):
        pytest.skip(f"{recording.name}: {situation}: {note or 'not in this recording'}")
    assert not note  # of what failed
    return rows


def _greedy(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["call"] == "POST /generate" and row["request"].get("sampling_params") == record_sglang.GREEDY
    ]


def _in_order(rows: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By what was asked, in which situation, and how many times before: runs of threads end in any order."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        request = {k: v for k, v in (row["request"] or {}).items() if k not in OWN}
        key = (row["situation"], row["call"], json.dumps(request, sort_keys=True))
        times = 0
        while (*key, times) in found:
            times += 1
        found[*key, times] = row
    return found


def _compare(key: tuple[Any, ...], expected: dict[str, Any], found: dict[str, Any], compared: Counter[str]) -> None:
    if "no_such_field" in key[2]:
        assert (expected["status"], found["status"]) == (500, 400), key  # SGLang fails over it, we refuse it
        return
    assert found["status"] == expected["status"], key
    theirs, mine = expected["reply"], found["reply"]
    if isinstance(theirs, dict) and not any(word in key[2] for word in OWN_WORDS):
        for name in [name for name in VALUES if name in theirs and "/server_info" not in key[1]]:
            assert mine[name] == theirs[name], (key, name)
            compared[name] += 1
        assert ("error" in mine) == ("error" in theirs), key
    if isinstance(theirs, str) and (expected["status"] == 200 or "flush" in key[1]):
        assert theirs.startswith(mine), key
        compared["text"] += 1
    if "meta_info" in (theirs or ()):
        _compare_generation(key, theirs, mine, compared)
    elif "/weights_checker" in key[1] and expected["status"] == 200:
        assert mine.keys() == theirs.keys()
        assert mine["ranks"][0].keys() == theirs["ranks"][0].keys()
        assert mine["ranks"][0]["parallelism_info"] == theirs["ranks"][0]["parallelism_info"]


def _compare_generation(key: tuple[Any, ...], theirs: Any, mine: Any, compared: Counter[str]) -> None:
    assert mine.keys() == theirs.keys(), key
    meta, real = mine["meta_info"], theirs["meta_info"]
    # New weights behind a pause in place: the embedded engine computes what it has again, SGLang goes on.
    values = [name for name in META if not (name == "num_retractions" and "in_place" in key[0])]
    assert {name: meta[name] for name in values} == {name: real[name] for name in values}, key
    assert {"id", "cached_tokens", "completion_tokens"} <= meta.keys() & real.keys()
    for reply in (mine, theirs):
        assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"], key
        assert [row[1] for row in reply["meta_info"]["output_token_logprobs"]] == reply["output_ids"], key
    if real["finish_reason"]["type"] == "stop":  # which token comes is the model's matter
        assert meta["finish_reason"]["type"] in ("stop", "length")
    else:
        assert meta["finish_reason"] == real["finish_reason"], key
        compared["finish_reason"] += 1
