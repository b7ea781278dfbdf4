"""Servers that hang, or die, in one call of a synchronisation: real processes of a few lines under the real fleet."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rl360.errors import EngineError
from rl360.serving.command import ServerFlags, launches
from rl360.serving.fleet import Fleet, WatchSettings
from rl360.serving.ports import claim_ports
from rl360.weight_sync.calls import each
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.sync import FleetSync
from rl360.weight_sync.transports import DiskTransport
from tests.weight_sync.kit import post

WATCH = WatchSettings(
    start_timeout_s=30, health_interval_s=5, health_timeout_s=5, health_failures=5, max_restarts=3, grace_s=5
)
STRAGGLER_S = 0.5
# The folder `faults` beside the script holds, for a port, the call in which its server hangs, or dies: once.
SERVER = """
import http.server, json, os, pathlib, signal, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
fault = pathlib.Path(__file__).parent / "faults" / str(port)
version = "0"
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        global version
        path = self.path.partition("?")[0]
        wanted, _, kind = fault.read_text().partition(" ") if fault.is_file() else ("", "", "")
        if path == wanted:
            fault.unlink()
            if kind == "dies": os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        if path == "/update_weight_version": version = body["new_version"]
        reply = {"success": True, "weight_version": version, "tp_size": 1, "output_ids": [1, 2], "sent": path}
        if path == "/weights_checker":
            reply |= {"ranks": [{"checksums": {"w": "1"}}], "per_engine_checksum": "1"}
        raw = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
    def do_GET(self): self.answer({})
    def do_POST(self): self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FolderTrainer:
    """Weights are a folder that nobody reads."""

    def __init__(self) -> None:
        self.version = 0

    def publish(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        return folder


class Rig:
    def __init__(self, fleet: Fleet, sync: FleetSync, faults: Path) -> None:
        self.fleet, self.sync, self._faults = fleet, sync, faults
        self.trainer: Any = FolderTrainer()

    def plan(self, url: str, path: str, kind: str = "hangs") -> None:
        (self._faults / url.rpartition(":")[2]).write_text(f"{path} {kind}")

    def came(self) -> bool:
        """Whether what was planned has happened."""
        return not any(self._faults.iterdir())

    def step_and_sync(self) -> Any:
        self.trainer.version += 1
        return self.sync.sync(self.trainer, self.trainer.version)

    def all_serve(self, version: int) -> None:
        eventually(lambda: self.fleet.serving() == self.fleet.urls())
        assert {post(url + "/model_info")["weight_version"] for url in self.fleet.urls()} == {str(version)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    closes: list[Callable[[], None]] = []

    def make(num_servers: int = 2, watch: WatchSettings = WATCH, control_timeout_s: float = 30.0) -> Rig:
        script, faults = tmp_path / "server.py", tmp_path / "faults"
        script.write_text(SERVER)
        faults.mkdir()
        flags = ServerFlags(tmp_path, 64, command=(sys.executable, str(script)))
        fleet = Fleet(launches(flags, claim_ports(num_servers, 0).pairs, []), tmp_path / "logs", watch)

        def make_engine(url: str) -> WeightEngine:
            return WeightEngine(url, control_timeout_s=control_timeout_s, straggler_s=STRAGGLER_S)

        sync = FleetSync(fleet, DiskTransport(tmp_path / "weights"), make_engine)
        fleet.bring_up = sync.bring_up
        closes.extend([fleet.close, sync.close])
        fleet.start()
        rig = Rig(fleet, sync, faults)
        rig.sync.sync(rig.trainer, 0)
        return rig

    yield make
    for close in reversed(closes):
        close()


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def kill(fleet: Fleet, url: str) -> None:
    keeper = fleet.pid(url)
    for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)


@contextmanager
def takes(at_least_s: float, at_most_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - began <= at_most_s


CALLS = {
    "/pause_generation": 1,  # times straggler_s
    "/update_weights_from_disk": 3,
    "/weights_checker": 3,
    "/flush_cache": 1,
    "/update_weight_version": 1,
    "/continue_generation": 1,
}


@pytest.mark.parametrize("path", CALLS)
def test_an_engine_that_hangs_in_a_call_is_left_behind_by_the_others(path: str, start: Callable[..., Rig]) -> None:
    rig = start()
    hung, other = rig.fleet.urls()
    rig.plan(hung, path)
    with takes(CALLS[path] * STRAGGLER_S, CALLS[path] * STRAGGLER_S + 2.0):
        report = rig.step_and_sync()
    assert rig.came()
    assert (report.confirmed, report.dropped) == ((other,), (hung,))
    rig.all_serve(version=1)


def test_a_call_that_takes_long_everywhere_is_no_hang() -> None:
    """The first answers after 0.6 s; the other has three times that beyond it, though its patience is 0.05 s."""
    import asyncio

    async def run(second_s: float) -> dict[str, str]:
        first, second = (WeightEngine(f"http://{name}", straggler_s=0.05) for name in "ab")
        return await each([first, second], lambda e: asyncio.sleep(0.6 if e is first else second_s))

    assert asyncio.run(run(2.0)) == {}
    failures = asyncio.run(run(10.0))
    assert list(failures) == ["http://b"]
    assert failures["http://b"].startswith("engine_timeout: http://b: no answer in 2.4 s, another engine's came in 0.6")


def test_engines_that_all_hang_are_replaced_and_the_version_advances(start: Callable[..., Rig]) -> None:
    rig = start(control_timeout_s=1.0)
    for url in rig.fleet.urls():
        rig.plan(url, "/pause_generation")
    report = rig.step_and_sync()
    assert (report.confirmed, set(report.dropped)) == ((), set(rig.fleet.urls()))
    rig.sync.check()
    rig.all_serve(version=1)
    assert rig.fleet.restarts() == 2
    assert rig.step_and_sync().confirmed == rig.fleet.urls()


def test_a_sync_that_finds_nobody_leaves_the_version_to_the_replacement(start: Callable[..., Rig]) -> None:
    rig = start(num_servers=1)
    kill(rig.fleet, rig.fleet.urls()[0])
    eventually(lambda: not rig.fleet.serving())
    assert rig.step_and_sync().confirmed == ()
    rig.all_serve(version=1)


def test_without_restarts_left_the_run_ends_and_says_why(start: Callable[..., Rig]) -> None:
    rig = start(num_servers=1, watch=replace(WATCH, max_restarts=0), control_timeout_s=1.0)
    rig.plan(rig.fleet.urls()[0], "/pause_generation")
    rig.step_and_sync()
    eventually(lambda: rig.fleet.hopeless() is not None)
    with pytest.raises(EngineError, match=r"no engine is left.*max_restarts.*server 0: version 1: .*/pause_generation"):
        rig.sync.check()


def test_engines_that_answer_and_take_nothing_end_the_run(start: Callable[..., Rig], monkeypatch: Any) -> None:
    """Other processes would not do better."""
    rig = start(num_servers=1)

    async def refuse(engine: WeightEngine, path: Path) -> None:
        raise EngineError("engine_reply", f"{engine.url} did not load {path}")

    monkeypatch.setattr(WeightEngine, "load_unnamed", refuse)
    with pytest.raises(EngineError, match=r"no engine took version 1: .*did not load"):
        rig.step_and_sync()


def test_a_moment_without_file_descriptors_does_not_end_the_run(start: Callable[..., Rig], monkeypatch: Any) -> None:
    rig = start(num_servers=1)
    connect, problems = aiohttp.TCPConnector.connect, [OSError(errno.EMFILE, "Too many open files")]

    async def fail_first(*args: Any, **kwargs: Any) -> Any:
        if problems:
            raise problems.pop()
        return await connect(*args, **kwargs)

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", fail_first)
    report = rig.step_and_sync()
    assert (report.confirmed, report.dropped) == ((), rig.fleet.urls())
    rig.all_serve(version=1)


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/update_weight_version"])
@pytest.mark.parametrize("kind", ["hangs", "dies"])
def test_a_replacement_that_hangs_or_dies_in_its_bring_up_is_started_again(
    kind: str, path: str, start: Callable[..., Rig]
) -> None:
    """Meanwhile the trainer's step waits for as long as three patiences, and what a sync of all took three times."""
    rig = start()
    broken, other = rig.fleet.urls()
    rig.plan(broken, path, kind)
    kill(rig.fleet, broken)
    eventually(rig.came)
    with takes(0.0, 3 * STRAGGLER_S + 1.5), rig.sync.hold():
        assert rig.fleet.serving() == (other,)
    rig.all_serve(version=0)
    assert rig.fleet.restarts() == 2
    assert rig.step_and_sync().confirmed == (broken, other)


def test_a_step_waits_for_nobody_while_a_replacement_starts(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.plan(rig.fleet.urls()[0], "/health")  # its start hangs, not its bring-up
    kill(rig.fleet, rig.fleet.urls()[0])
    eventually(rig.came)
    with takes(0.0, 0.5), rig.sync.hold():
        assert rig.fleet.serving() == rig.fleet.urls()[1:]


def test_a_replacement_gets_no_weights_while_a_checkpoint_is_begun(start: Callable[..., Rig]) -> None:
    """Both ask all ranks of the trainer; two calls at once may reach them in different orders, and then all wait."""
    rig = start()
    said: list[str] = []

    def bring_up(url: str) -> None:
        said.append("asks")
        rig.sync.bring_up(url)
        said.append("has them")

    rig.fleet.bring_up = bring_up
    with rig.sync.resident():
        kill(rig.fleet, rig.fleet.urls()[0])
        eventually(lambda: said == ["asks"])
        time.sleep(1.0)
        assert said == ["asks"]
    eventually(lambda: said == ["asks", "has them"])
    rig.all_serve(version=0)
