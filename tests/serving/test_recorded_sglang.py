"""Our clients against what a real SGLang 0.5.16 answered on an H200, and the embedded engine's answers beside it."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import aiohttp
import pytest

from rl360.errors import EngineError
from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.server import EngineServer
from rl360.gateway.engine_pool import EnginePool
from rl360.gateway.routes import LeastLoaded
from rl360.models.loading import load_decoder
from rl360.types import Sampling
from rl360.weight_sync.engine import WeightEngine
from tests.serving.replay import RECORDINGS, Replay, serve
from tests.tiny_model import write_tiny_llama

RECORDING = RECORDINGS / "sglang-0.5.16.json"
IDS = [1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


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
            await engine.join("127.0.0.1", 1, 1, 2, "g", "nccl")
        assert caught.value.cause == "engine_status_501"
        await engine.close()


async def test_the_embedded_engine_has_the_recorded_statuses_and_fields(model: Path) -> None:
    """Every recorded call, made to the embedded engine: the same status, and no field that we read is missing."""
    decoder = load_decoder(model, random_init_seed=1)
    server = EngineServer(EmbeddedEngine(decoder, model, kv_cache_gib=0.05, num_threads=1))
    url = await asyncio.to_thread(server.start)
    read = {"output_ids", "text", "meta_info"}
    meta = {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version"}
    try:
        async with aiohttp.ClientSession() as client:
            for row in Replay(RECORDING).rows:
                method, path = row["call"].split()
                body = row["request"]
                if path == "/generate":
                    body = {**body, "input_ids": IDS}
                if path == "/health" and row["status"] == 503:
                    continue  # paused, and recorded with a /health that generates: the fleet turns that off
                async with client.request(method, url + path, json=body) as response:
                    assert (response.status == 200) == (row["status"] == 200), row["call"]
                    if path == "/generate" and row["status"] == 200:
                        reply = await response.json()
                        assert read & row["reply"].keys() <= reply.keys()
                        assert meta & row["reply"]["meta_info"].keys() <= reply["meta_info"].keys()
    finally:
        await asyncio.to_thread(server.close)
