"""Memory that changes hands between a trainer and real server processes: the order, faults, and what is refused.

The servers keep track of what they released: a request, a load or a hash while memory is away is an error there, and
released weights are NaN, so that one tensor that did not come back would show.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import urllib.error
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl360.errors import EngineError
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.engine_pool import EnginePool
from rl360.gateway.routes import LeastLoaded
from rl360.serving.fleet import Fleet
from rl360.types import Sampling
from rl360.weight_sync.colocated import ColocatedSync
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.transports import DiskTransport, HandleTransport
from tests.tiny_model import write_tiny_llama
from tests.weight_sync.kit import BUCKET_BYTES, PROMPT, StubTrainer, checksum, embedded_fleet, greedy, post
from tests.weight_sync.test_sync import PoolGate, eventually

CALLS = ("abort", "pause", "release_memory", "resume_memory", "checksums", "set_version", "flush", "resume")


class Order(list[str]):
    """What happened, in the order of time, across trainer and engines; the same step of several engines counts once."""

    def add(self, what: str) -> None:
        if not self or self[-1] != what:
            self.append(what)


class MovingTrainer(StubTrainer):
    """Its weights may only be touched while it has its memory."""

    def __init__(self, folder: Path, seed: int, order: Order) -> None:
        super().__init__(folder, seed)
        self.order, self.has_memory = order, True

    def offload(self) -> None:
        assert self.has_memory
        self.has_memory = False
        self.order.add("offload")

    def onload(self) -> None:
        assert not self.has_memory
        self.has_memory = True
        self.order.add("onload")

    def trim(self) -> None:
        assert self.has_memory
        self.order.add("trim")

    def tensors(self) -> Any:
        assert self.has_memory
        return super().tensors()

    def step(self, seed: int | None = None) -> int:
        assert self.has_memory
        self.order.add("step")
        return super().step(seed)

    def publish(self, folder: Path) -> Path:
        assert self.has_memory
        return super().publish(folder)


def recording(order: Order, before_send: Callable[[str], None]) -> Callable[[str], WeightEngine]:
    class Recording(WeightEngine):
        async def take_handles(self, handles: Any) -> None:
            order.add("send")
            before_send(self.url)
            await super().take_handles(handles)

    def wrap(name: str) -> Any:
        async def call(self: WeightEngine, *args: Any) -> Any:
            tags = f" {'+'.join(args[0])}" if name.endswith("memory") else ""
            order.add(name + tags)
            return await getattr(WeightEngine, name)(self, *args)

        return call

    for name in CALLS:
        setattr(Recording, name, wrap(name))
    return lambda url: Recording(
        url, request_timeout_s=30, control_timeout_s=10, transfer_timeout_s=20, straggler_s=1.0
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def fleet(folder: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = embedded_fleet(folder, tmp_path / "logs", 2)
    fleet.start()
    yield fleet
    fleet.close()


def make(
    fleet: Fleet, folder: Path, seed: int, transport: Any = None, before_send: Callable[[str], None] = lambda url: None
) -> tuple[MovingTrainer, ColocatedSync, Order]:
    order = Order()
    trainer = MovingTrainer(folder, seed, order)
    trainer.offload()
    sync = ColocatedSync(
        fleet,
        transport or HandleTransport(BUCKET_BYTES, dtype="float32"),
        recording(order, before_send),
        trainer=trainer,
        bring_up_timeout_s=60,
    )
    fleet.bring_up = sync.bring_up
    sync.sync(trainer, 0)
    order.clear()
    return trainer, sync, order


def servers(fleet: Fleet, url: str) -> list[int]:
    keeper = fleet.pid(url)
    return [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]


async def test_the_order_of_one_iteration_with_requests_that_notice_nothing(fleet: Fleet, folder: Path) -> None:
    trainer, sync, order = await asyncio.to_thread(make, fleet, folder, 3)
    pool = EnginePool(LeastLoaded([HttpEngine(url, request_timeout_s=60) for url in fleet.urls()]), 5)
    sync.hold_requests_at(PoolGate(pool, asyncio.get_running_loop()))
    turns = [
        asyncio.create_task(pool.generate(f"s{i}", f"s{i}.0", array("i", PROMPT), Sampling(), 300, seed=i))
        for i in range(4)
    ]
    await asyncio.sleep(0.2)

    def iteration() -> None:
        with sync.hold():
            for url in fleet.urls():
                with pytest.raises(urllib.error.HTTPError):  # an engine without memory refuses to compute
                    greedy(url)
                with pytest.raises(urllib.error.HTTPError):
                    post(url + "/continue_generation", {})
            trainer.step()
        late.append(asyncio.run_coroutine_threadsafe(ask_late(), loop))
        report = sync.sync(trainer, trainer.version)
        assert report.confirmed == fleet.urls()
        assert 0 < report.transfer_s < report.stall_s

    async def ask_late() -> Any:
        return await pool.generate("late", "late.0", array("i", PROMPT), Sampling(), 20, seed=1)

    loop, late = asyncio.get_running_loop(), []
    await asyncio.to_thread(iteration)
    await asyncio.gather(*turns)
    assert (await asyncio.wrap_future(late[0])).version_spans[0].version == 1
    assert [what for what in order if what != "abort"] == [
        "pause", "flush", "release_memory kv_cache+weights", "onload", "step", "trim",
        "resume_memory weights", "send", "checksums", "set_version", "offload", "resume_memory kv_cache",
        "flush", "resume",
    ]  # fmt: skip
    assert all(turn.result().token_ids for turn in turns)
    assert greedy(fleet.urls()[0])["meta_info"]["weight_version"] == "1"
    assert len({checksum(url) for url in fleet.urls()}) == 1
    await pool.close()
    await asyncio.to_thread(sync.close)


def test_a_checkpoint_is_written_while_the_trainer_has_its_memory(fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    trainer, sync, order = make(fleet, folder, 5, DiskTransport(tmp_path / "weights", dtype="float32"))
    before = checksum(fleet.urls()[0])
    with sync.resident():
        trainer.publish(tmp_path / "saved")
    assert not trainer.has_memory
    assert checksum(fleet.urls()[0]) == before  # the same weights came back
    assert order.count("onload") == 1
    with sync.hold():
        trainer.step()
        with sync.resident():  # it has it already: nothing moves
            pass
    assert order.count("onload") == 2
    assert trainer.has_memory
    sync.sync(trainer, 1)
    with sync.resident(last=True):
        pass
    with sync.resident(last=True):
        trainer.publish(tmp_path / "hf")
    assert trainer.has_memory  # at the end engines are not brought back
    assert order[-1] == "onload"
    sync.close()


def test_a_server_that_dies_while_it_has_no_memory_is_replaced_afterwards(fleet: Fleet, folder: Path) -> None:
    trainer, sync, order = make(fleet, folder, 7)
    dead, other = fleet.urls()
    with sync.hold():
        for pid in servers(fleet, dead):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: fleet.serving() == (other,))
        threading.Event().wait(2.5)  # longer than the pause before a restart
        with pytest.raises((urllib.error.URLError, ConnectionError)):  # nobody took memory meanwhile
            post(dead + "/model_info")
        trainer.step()
    assert sync.sync(trainer, 1).confirmed == (other,)
    eventually(lambda: set(fleet.serving()) == {dead, other})
    assert not trainer.has_memory
    assert checksum(dead) == checksum(other)
    assert greedy(dead)["meta_info"]["weight_version"] == "1"
    assert order.count("onload") == order.count("offload") == 2  # one hand-over more, with both
    sync.close()


def test_the_only_server_dies_while_the_trainer_steps_and_the_run_goes_on(folder: Path, tmp_path: Path) -> None:
    fleet = embedded_fleet(folder, tmp_path / "logs", 1)
    (url,) = fleet.start()
    try:
        trainer, sync, _ = make(fleet, folder, 9)
        with sync.hold():
            for pid in servers(fleet, url):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: fleet.serving() == ())
            trainer.step()
        assert sync.sync(trainer, 1).confirmed == ()
        eventually(lambda: fleet.serving() == (url,))
        assert greedy(url)["meta_info"]["weight_version"] == "1"
        sync.close()
    finally:
        fleet.close()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_replacement_that_hangs_as_weights_arrive_is_left_and_started_again(
    num_servers: int, folder: Path, tmp_path: Path
) -> None:
    """The trainer's next step waits for seconds, whether others are there to compare with or not."""
    fleet = embedded_fleet(folder, tmp_path / "logs", num_servers)
    url, *others = fleet.start()
    hangs = threading.Event()
    hung = threading.Event()

    def before_send(to: str) -> None:
        if to == url and hangs.is_set():
            hangs.clear()
            for pid in servers(fleet, url):
                os.kill(pid, signal.SIGSTOP)
            hung.set()

    try:
        trainer, sync, _ = make(fleet, folder, 19, before_send=before_send)
        hangs.set()
        for pid in servers(fleet, url):
            os.kill(pid, signal.SIGKILL)
        assert hung.wait(40)
        began = time.monotonic()
        with sync.hold():
            assert time.monotonic() - began < 8  # three patiences, and three times the usual
            assert fleet.serving() == tuple(others)
            trainer.step()
        assert sync.sync(trainer, 1).confirmed == tuple(others)
        eventually(lambda: fleet.serving() == fleet.urls())
        assert greedy(url)["meta_info"]["weight_version"] == "1"
        assert len({checksum(one) for one in fleet.urls()}) == 1
        sync.close()
    finally:
        fleet.close()


@pytest.mark.parametrize("step", ["onload", "trim", "offload"])
def test_a_trainer_that_fails_as_a_replacement_gets_its_weights_ends_the_run(
    step: str, fleet: Fleet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines have given their memory away by then, and nobody would give it back: sessions waited for good."""
    trainer, sync, _ = make(fleet, folder, 21)
    sync.check()

    def fail(*args: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(trainer, step, fail)
    for pid in servers(fleet, fleet.urls()[0]):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"weight_version: the hand-over of memory for .*CUDA out of memory"):
        eventually(lambda: sync.check() is not None)
    sync.close()


def test_a_server_that_starts_when_its_memory_is_needed_is_ended_and_started_later(fleet: Fleet, folder: Path) -> None:
    trainer, sync, _ = make(fleet, folder, 11)
    late, other = fleet.urls()
    fleet.leave(late, "test")
    eventually(lambda: fleet.restarts() == 1)
    with sync.hold():  # whether it was starting by now or waited for weights: it is gone
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            post(late + "/model_info")
        trainer.step()
    sync.sync(trainer, 1)
    eventually(lambda: set(fleet.serving()) == {late, other})
    assert fleet.restarts() == 1  # being ended for its memory is no fault of its own
    assert checksum(late) == checksum(other)
    sync.close()


def test_a_silent_engine_is_not_killed_for_it_while_it_has_no_memory(fleet: Fleet, folder: Path) -> None:
    trainer, sync, _ = make(fleet, folder, 13)
    url = fleet.urls()[0]
    with sync.hold():
        pids = servers(fleet, url)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(7.0)  # more than one check's deadline and interval
        assert set(fleet.serving()) == set(fleet.urls())
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        trainer.step()
    assert sync.sync(trainer, 1).confirmed == fleet.urls()
    assert fleet.restarts() == 0
    sync.close()


def test_an_engine_that_does_not_give_its_memory_leaves_before_the_trainer_comes(fleet: Fleet, folder: Path) -> None:
    trainer, sync, _ = make(fleet, folder, 15)
    bad, good = fleet.urls()
    post_raw(bad, "/pause_generation", {"mode": "abort"})
    post_raw(bad, "/release_memory_occupation", {"tags": ["kv_cache"]})  # it refuses to do so twice
    with sync.hold():
        assert fleet.serving() == (good,)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            post(bad + "/model_info")
        trainer.step()
    assert sync.sync(trainer, 1).confirmed == (good,)
    eventually(lambda: set(fleet.serving()) == {bad, good})
    sync.close()


def test_nobody_takes_the_weights_is_an_error(folder: Path, tmp_path: Path) -> None:
    fleet = embedded_fleet(folder, tmp_path / "logs", 1)
    (url,) = fleet.start()
    try:
        trainer, sync, _ = make(fleet, folder, 17)
        with sync.hold():
            trainer.step()
        post_raw(url, "/resume_memory_occupation", {"tags": ["weights"]})  # behind our back: ours is refused
        with pytest.raises(EngineError, match=r"no engine took version 1.*not released"):
            sync.sync(trainer, 1)
        sync.close()
    finally:
        fleet.close()


def post_raw(url: str, path: str, body: dict[str, Any]) -> None:
    import json
    import urllib.request

    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        reply.read()
