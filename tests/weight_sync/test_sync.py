"""Weights to real server processes by every transport, with faults, under load, and against a cold start."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl360.errors import EngineError
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.engine_pool import EnginePool
from rl360.gateway.routes import LeastLoaded
from rl360.serving.fleet import Fleet
from rl360.types import Sampling
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.sources import BucketSpec, TensorSource
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import BroadcastTransport, DiskTransport, HandleTransport, Transport
from tests.tiny_model import write_tiny_llama
from tests.weight_sync.kit import (
    BUCKET_BYTES,
    PROMPT,
    StubTrainer,
    checksum,
    embedded_fleet,
    greedy,
    logprobs,
    make_engine,
    post,
)

TRANSPORTS = ("disk", "ipc", "nccl")
TRANSFER = {
    "disk": "/update_weights_from_disk",
    "ipc": "/update_weights_from_tensor",
    "nccl": "/update_weights_from_distributed",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = embedded_fleet(folder, tmp_path_factory.mktemp("logs"), 2)
    fleet.start()
    yield fleet
    fleet.close()


@pytest.fixture
def mortal_fleet(folder: Path, tmp_path: Path) -> Iterator[Fleet]:
    """For tests that kill servers."""
    fleet = embedded_fleet(folder, tmp_path / "logs", 2)
    fleet.start()
    yield fleet
    fleet.close()


def transport(kind: str, tmp_path: Path, **changes: Any) -> Transport:
    if kind == "disk":
        return DiskTransport(tmp_path / "weights", dtype="float32")
    if kind == "ipc":
        return HandleTransport(BUCKET_BYTES, dtype="float32")
    return BroadcastTransport(BUCKET_BYTES, dtype="float32", backend="gloo", **changes)


def recorded(calls: dict[str, list[str]]) -> Callable[[str], WeightEngine]:
    """Makes clients that note what they ask of each engine, each run of equal calls once."""

    class Recording(WeightEngine):
        async def exchange(self, method: str, path: str, *args: Any, **more: Any) -> Any:
            asked = calls.setdefault(self.url, [])
            if method == "POST" and asked[-1:] != [path.partition("?")[0]]:
                asked.append(path.partition("?")[0])
            return await super().exchange(method, path, *args, **more)

    return lambda url: Recording(url, request_timeout_s=30, control_timeout_s=10, transfer_timeout_s=20)


def eventually(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_after_a_sync_engines_equal_one_started_from_the_export(
    kind: str, fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    trainer = StubTrainer(folder, seed=3)
    calls: dict[str, list[str]] = {}
    sync = FleetSync(fleet, transport(kind, tmp_path), recorded(calls))
    before = greedy(fleet.urls()[0])
    report = sync.sync(trainer, trainer.step(seed=len(kind) * 10 + TRANSPORTS.index(kind)))
    assert report.confirmed == fleet.urls()
    assert report.dropped == ()
    assert 0 < report.transfer_s < report.stall_s
    for url in fleet.urls():  # the cache is flushed whether or not an engine does so by itself
        assert calls[url][calls[url].index("/pause_generation") :] == [
            "/pause_generation",
            TRANSFER[kind],
            *(["/destroy_weights_update_group"] if kind == "nccl" else []),
            "/weights_checker",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
        ]
    exported = trainer.publish(tmp_path / "export")
    cold = embedded_fleet(folder, tmp_path / "logs", 1, model=exported)
    (cold_url,) = cold.start()
    try:
        reference, reference_sum = greedy(cold_url), checksum(cold_url)
    finally:
        cold.close()
    for url in fleet.urls():
        reply = greedy(url)
        assert reply["output_ids"] == reference["output_ids"]
        assert (
            logprobs(reply) == logprobs(reference) != logprobs(before)
        )  # the same computation on the same weights, bit for bit
        assert checksum(url) == reference_sum
        assert reply["meta_info"]["weight_version"] == "1"
        assert reply["meta_info"]["cached_tokens"] == 0  # no prefix of the old weights
    sync.sync(trainer, trainer.step())
    assert greedy(fleet.urls()[0])["meta_info"]["weight_version"] == "2"
    sync.close()


def test_groups_of_one_engine_each(fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    trainer = StubTrainer(folder, seed=5)
    sync = FleetSync(fleet, transport("nccl", tmp_path, engines_per_group=1), make_engine)
    assert sync.sync(trainer, trainer.step()).confirmed == fleet.urls()
    assert len({checksum(url) for url in fleet.urls()}) == 1
    sync.close()


class Skipping(TensorSource):
    """Leaves one tensor out."""

    def __init__(self, trainer: StubTrainer) -> None:
        def tensors() -> Iterable[tuple[str, Tensor]]:
            return ((n, t) for n, t in trainer.tensors() if n != "model.layers.1.mlp.up_proj.weight")

        super().__init__(tensors)


class Corrupting(TensorSource):
    """Flips one bit of a bucket after it was hashed, as a bad transfer would."""

    def prepare(self) -> BucketSpec | None:
        spec = super().prepare()
        if spec is not None and spec.index == 2:
            self._buckets[2][0].flat_B[100] ^= 1
        return spec


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (Skipping, r"model\.layers\.1\.mlp\.up_proj\.weight was not sent"),
        (lambda trainer: Corrupting(trainer.tensors), r"bucket 2: model\.\S+ is [0-9a-f]{16}, sent [0-9a-f]{16}"),
    ],
)
def test_a_skipped_or_corrupted_tensor_is_named_and_the_version_does_not_advance(
    kind: str, source: Callable[[StubTrainer], TensorSource], problem: str, fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    trainer = StubTrainer(folder, seed=7, source=source)
    served = post(fleet.urls()[0] + "/model_info")["weight_version"]
    sync = FleetSync(FixedSet(fleet.urls()), transport(kind, tmp_path), make_engine)
    with pytest.raises(EngineError, match=problem) as caught:
        sync.sync(trainer, trainer.step())
    assert caught.value.cause == "weight_version"
    assert post(fleet.urls()[0] + "/model_info")["weight_version"] == served
    for url in fleet.urls():
        post(url + "/continue_generation", {})
    sync.close()


class ByEngine(TensorSource):
    """Hands the first reader of bucket 1 a damaged handle, and the other a good one."""

    damaged = False
    one_at_a_time = threading.Lock()

    def export(self, index: int, count: int) -> list[str]:
        with self.one_at_a_time:
            if index != 1 or self.damaged:
                return super().export(index, count)
            self.damaged = True
            flat_B = self._buckets[index][0].flat_B
            flat_B[0] ^= 1
            try:
                return super().export(index, count)
            finally:
                flat_B[0] ^= 1


def test_an_engine_with_wrong_weights_leaves_and_its_replacement_is_current_before_it_serves(
    mortal_fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    fleet = mortal_fleet
    trainer = StubTrainer(folder, seed=9, source=lambda t: ByEngine(t.tensors))
    sync = FleetSync(fleet, transport("ipc", tmp_path), make_engine)
    fleet.bring_up = sync.bring_up
    seen: list[tuple[tuple[str, ...], list[str]]] = []

    def look(urls: tuple[str, ...]) -> None:
        seen.append((urls, [post(url + "/model_info")["weight_version"] for url in urls]))

    fleet.on_change(look)
    report = sync.sync(trainer, trainer.step())
    assert len(report.confirmed) == len(report.dropped) == 1
    eventually(lambda: len(seen) == 2)  # listeners hear of a change just after `serving` says it
    assert seen[0][0] == report.confirmed
    assert seen[-1][1] == ["1", "1"]
    assert len({checksum(url) for url in fleet.urls()}) == 1
    sync.close()


class Killing(TensorSource):
    """Kills a server when bucket 2 has been laid flat."""

    victim: Callable[[], None]
    done = False

    def prepare(self) -> BucketSpec | None:
        spec = super().prepare()
        if spec is not None and spec.index == 2 and not self.done:
            self.done = True
            self.victim()
        return spec


def kill_server(fleet: Fleet, url: str, signum: int = signal.SIGKILL) -> None:
    keeper = fleet.pid(url)
    for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
        os.kill(int(child), signum)


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_an_engine_killed_mid_sync_is_replaced_not_waited_for(
    kind: str, mortal_fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    fleet = mortal_fleet
    dead, other = fleet.urls()
    source: list[Killing] = []

    def killing(trainer: StubTrainer) -> TensorSource:
        source.append(Killing(trainer.tensors))
        source[0].victim = lambda: kill_server(fleet, dead)
        return source[0]

    trainer = StubTrainer(folder, seed=11, source=killing)
    sync = FleetSync(fleet, transport(kind, tmp_path), make_engine)
    fleet.bring_up = sync.bring_up
    began = time.monotonic()
    report = sync.sync(trainer, trainer.step())
    assert time.monotonic() - began < 15
    assert report.confirmed == (other,)
    assert report.dropped == (dead,)
    assert greedy(other)["meta_info"]["weight_version"] == "1"
    eventually(lambda: set(fleet.serving()) == {dead, other})
    assert checksum(dead) == checksum(other)
    assert greedy(dead)["meta_info"]["weight_version"] == "1"
    sync.close()


@pytest.mark.parametrize(("num_servers", "per_group"), [(2, 0), (2, 1), (1, 0)])
def test_an_engine_that_hangs_in_a_broadcast_is_given_up_by_what_buckets_took_before(
    num_servers: int, per_group: int, folder: Path, tmp_path: Path
) -> None:
    """The call's own timeout is 20 s; three times `straggler_s` is 3 s."""
    fleet = embedded_fleet(folder, tmp_path / "logs", num_servers)
    fleet.start()
    hung = fleet.urls()[0]
    source: list[Killing] = []

    def stopping(trainer: StubTrainer) -> TensorSource:
        # Gloo, unlike NCCL, cannot cut off a send: it ends by the group's timeout.
        source.append(Killing(trainer.tensors, group_timeout_s=5.0))
        source[0].victim = lambda: kill_server(fleet, hung, signal.SIGSTOP)
        return source[0]

    def engine(url: str) -> WeightEngine:
        made = make_engine(url)
        made.straggler_s = 1.0
        return made

    trainer = StubTrainer(folder, seed=11, source=stopping)
    sync = FleetSync(fleet, transport("nccl", tmp_path, engines_per_group=per_group), engine)
    source[0].done = True
    sync.sync(trainer, 0)
    fleet.bring_up = sync.bring_up
    source[0].done = False
    began = time.monotonic()
    report = sync.sync(trainer, trainer.step())
    try:
        assert 3.0 < time.monotonic() - began < 12.0
        assert hung in report.dropped
        if per_group == 1:  # with one group for all, gloo may or may not let the other one go
            assert report.confirmed == fleet.urls()[1:]
        eventually(lambda: set(fleet.serving()) == set(fleet.urls()))
        assert {greedy(url)["meta_info"]["weight_version"] for url in fleet.urls()} == {"1"}
        assert len({checksum(url) for url in fleet.urls()}) == 1
    finally:
        fleet.close()
        sync.close()


def test_a_replacement_waits_for_the_sync_that_is_due(mortal_fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    """Between a step and its sync the trainer holds weights that nobody serves yet."""
    fleet = mortal_fleet
    trainer = StubTrainer(folder, seed=13)
    sync = FleetSync(fleet, transport("ipc", tmp_path), make_engine)
    fleet.bring_up = sync.bring_up
    sync.sync(trainer, 0)
    with sync.hold():
        trainer.step()
    url = fleet.urls()[0]
    fleet.leave(url, "test")
    eventually(lambda: fleet.restarts() == 1)
    time.sleep(5.0)
    assert url not in fleet.serving()
    assert sync.sync(trainer, trainer.version).confirmed == (fleet.urls()[1],)
    eventually(lambda: url in fleet.serving())
    assert greedy(url)["meta_info"]["weight_version"] == "1"
    sync.close()


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_requests_that_run_go_on_and_agents_do_not_notice(
    kind: str, fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    trainer = StubTrainer(folder, seed=15)
    sync = FleetSync(fleet, transport(kind, tmp_path), make_engine)
    await asyncio.to_thread(sync.sync, trainer, 0)
    engines = [HttpEngine(url, request_timeout_s=60) for url in fleet.urls()]
    pool = EnginePool(LeastLoaded(engines), 60)
    sampling = Sampling(max_new_tokens=700)
    turns = [
        asyncio.create_task(pool.generate(f"s{i}", f"s{i}.0", array("i", PROMPT), sampling, 700, seed=i))
        for i in range(6)
    ]
    for _ in range(3):
        await asyncio.sleep(0.25)
        await asyncio.to_thread(sync.sync, trainer, trainer.step())
    generations = await asyncio.gather(*turns)
    interrupted = 0
    for generation in generations:
        spans = generation.version_spans
        assert spans[0].start == 0
        assert spans[-1].end == len(generation.token_ids) == len(generation.logprobs)
        assert all(a.end == b.start for a, b in pairwise(spans))
        assert [span.version for span in spans] == sorted(span.version for span in spans)
        assert generation.finish_type in ("stop", "length")
        interrupted += len(spans) > 1
    assert interrupted > 0
    await pool.close()
    await asyncio.to_thread(sync.close)


class PoolGate:
    """What the gateway is to a sync, around a pool in another event loop; remembers the order of things."""

    def __init__(self, pool: EnginePool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool, self._loop = pool, loop
        self.left: list[int] = []

    async def _there(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    async def hold(self) -> None:
        await self._there(self._pool.hold)

    async def idle(self, timeout_s: float) -> int:
        self.left.append(await self._there(lambda: self._pool.idle(timeout_s)))
        return self.left[-1]

    async def release(self) -> None:
        await self._there(self._pool.release)


@pytest.mark.parametrize("mode", ["interrupt", "drain"])
async def test_requests_are_held_before_the_pause(mode: str, fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    """Interrupted or drained: nothing is on an engine when it is paused, and agents get whole turns in both modes."""
    at_pause: list[int] = []

    class Watched(type(make_engine(fleet.urls()[0]))):  # type: ignore[misc]
        async def pause(self) -> None:
            at_pause.append(post_state(self.url))
            await super().pause()

    trainer = StubTrainer(folder, seed=19)
    sync = FleetSync(
        fleet, transport("ipc", tmp_path), lambda url: Watched(url, request_timeout_s=30), mode=mode, drain_timeout_s=50
    )
    await asyncio.to_thread(sync.sync, trainer, 0)
    at_pause.clear()
    pool = EnginePool(LeastLoaded([HttpEngine(url, request_timeout_s=60) for url in fleet.urls()]), 60)
    gate = PoolGate(pool, asyncio.get_running_loop())
    sync.hold_requests_at(gate)
    sampling = Sampling(max_new_tokens=400)
    synced = asyncio.Event()

    async def agent(name: str) -> list[Any]:
        """Turns one after the other, as an agent has them, until both syncs are over."""
        turns: list[Any] = []
        while not synced.is_set():
            turn = f"{name}.{len(turns)}"
            turns.append(await pool.generate(name, turn, array("i", PROMPT), sampling, 400, seed=len(turns)))
        return turns

    agents = [asyncio.create_task(agent(f"s{i}")) for i in range(4)]
    for _ in range(2):
        await asyncio.sleep(0.25)
        await asyncio.to_thread(sync.sync, trainer, trainer.step())
    synced.set()
    turns = [turn for turns in await asyncio.gather(*agents) for turn in turns]
    assert at_pause == [0] * 4  # 2 engines, 2 syncs
    for turn in turns:
        assert turn.finish_type in ("stop", "length")
        assert len(turn.token_ids) == len(turn.logprobs) == turn.version_spans[-1].end
    assert {turn.version_spans[-1].version for turn in turns} & {1, 2}
    interrupted = sum(turn.interruptions > 0 for turn in turns)
    assert (interrupted > 0) == (mode == "interrupt")
    assert gate.left[-1] == 0
    await pool.close()
    await asyncio.to_thread(sync.close)


def post_state(url: str) -> int:
    """Requests on an engine."""
    import json
    import urllib.request

    with urllib.request.urlopen(url + "/server_info", timeout=10) as reply:
        state = json.loads(reply.read())["internal_states"][0]
    return int(state["num_running_reqs"] + state["num_waiting_reqs"])


def test_each_token_was_sampled_by_the_version_that_it_carries(fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    """The logprobs of an interrupted turn equal those of each version's own weights, on the exact ids before them."""
    trainer = StubTrainer(folder, seed=17)
    weights = {0: load(trainer)}
    sync = FleetSync(fleet, transport("ipc", tmp_path), make_engine)
    sync.sync(trainer, 0)

    async def turn() -> Any:
        pool = EnginePool(LeastLoaded([HttpEngine(fleet.urls()[0], request_timeout_s=60)]), 60)
        sampling = Sampling(max_new_tokens=500)
        running = asyncio.create_task(pool.generate("s", "s.0", array("i", PROMPT), sampling, 500, seed=1))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(sync.sync, trainer, trainer.step())
        weights[1] = load(trainer)
        generation = await running
        await pool.close()
        return generation

    generation = asyncio.run(turn())
    ids = torch.tensor([*PROMPT, *generation.token_ids])
    assert {span.version for span in generation.version_spans} == {0, 1}
    from rl360.models.decoder import causal_attend

    for span in generation.version_spans:
        decoder = weights[span.version]
        with torch.no_grad():
            logits = decoder.logits(decoder.hidden(ids, torch.arange(len(ids)), causal_attend()))
        at = torch.arange(len(PROMPT) + span.start, len(PROMPT) + span.end)
        expected = logits.log_softmax(-1)[at - 1, ids[at]]
        torch.testing.assert_close(
            torch.tensor(generation.logprobs[span.start : span.end]), expected, atol=2e-4, rtol=1e-4
        )
    sync.close()


def load(trainer: StubTrainer) -> Any:
    import copy

    return copy.deepcopy(trainer.decoder)


def test_a_trainer_step_and_a_replacement_never_overlap(folder: Path) -> None:
    sync = FleetSync(FixedSet(()), HandleTransport(BUCKET_BYTES), make_engine, bring_up_timeout_s=0.2)
    entered = threading.Event()

    def bring() -> None:
        with pytest.raises(EngineError, match="no current weights"):
            sync.bring_up("http://127.0.0.1:1")
        entered.set()

    with sync.hold():
        thread = threading.Thread(target=bring)
        thread.start()
        assert not entered.wait(0.5)
    thread.join()
    assert entered.is_set()


def test_nobody_serving_is_an_error(folder: Path, tmp_path: Path) -> None:
    sync = FleetSync(FixedSet(()), DiskTransport(tmp_path), make_engine)
    with pytest.raises(EngineError, match="no engine serves"):
        sync.sync(StubTrainer(folder, seed=1), 1)
