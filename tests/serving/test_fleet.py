"""The fleet's real code on real processes: the embedded engine, started with SGLang's flags, is the server."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl360.errors import InfrastructureError
from rl360.serving.command import ServerFlags, launches
from rl360.serving.fleet import Fleet, WatchSettings
from rl360.serving.ports import claim_ports
from tests.tiny_model import write_tiny_llama

EMBEDDED = (sys.executable, "-m", "rl360.gateway.embedded.serve")
WATCH = WatchSettings(
    start_timeout_s=60, health_interval_s=0.3, health_timeout_s=1.0, health_failures=2, max_restarts=2, grace_s=5
)
# A server of a few lines, for what has nothing to do with an engine: answers with {}, and a request with two tokens.
PLAIN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"output_ids": [1, 2]}')
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def plain_flags(tmp_path: Path, source: str = PLAIN) -> ServerFlags:
    script = tmp_path / "server.py"
    script.write_text(source)
    return ServerFlags(tmp_path, 64, command=(sys.executable, str(script)))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    fleets = []

    def make(flags: ServerFlags, num_servers: int = 1, watch: WatchSettings = WATCH) -> Fleet:
        fleet = Fleet(launches(flags, claim_ports(num_servers, 0).pairs, []), tmp_path / "logs", watch)
        fleets.append(fleet)
        fleet.start()
        return fleet

    yield make
    for fleet in fleets:
        fleet.close()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.loads(reply.read() or b"{}")


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def server_pids(fleet: Fleet, url: str) -> list[int]:
    """The server below its keeper."""
    keeper = fleet.pid(url)
    return [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_embedded_servers_start_serve_and_end(start: Callable[..., Fleet], tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    flags = ServerFlags(
        folder,
        512,
        command=EMBEDDED,
        dtype="float32",
        weight_version=4,
        extra_args=("--threads", "1", "--kv-cache-gib", "0.05"),
    )
    fleet = start(flags, 2)
    assert fleet.serving() == fleet.urls()
    assert len(fleet.urls()) == 2
    for url in fleet.serving():
        assert get(url + "/model_info")["weight_version"] == "4"
    pids = [pid for url in fleet.urls() for pid in server_pids(fleet, url)]
    fleet.close()
    assert all(gone(pid) for pid in pids)
    for index in range(2):
        text = (tmp_path / "logs" / f"sglang-{index}.log").read_text()
        assert "--weight-version 4" in text
        assert "the embedded engine serves" in text


def test_a_killed_server_leaves_the_set_and_returns_with_weights(start: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = start(plain_flags(tmp_path), 2)
    dead, other = fleet.urls()
    told: list[tuple[str, ...]] = []
    brought: list[tuple[str, bool]] = []
    fleet.on_change(told.append)
    fleet.bring_up = lambda url: brought.append((url, url in fleet.serving()))
    os.kill(server_pids(fleet, dead)[0], signal.SIGKILL)
    eventually(lambda: (other,) in told)
    eventually(lambda: fleet.serving() == (dead, other))
    assert told == [(other,), (dead, other)]
    assert brought == [(dead, False)]  # before it serves
    assert get(dead + "/server_info") == {}
    assert fleet.restarts() == 1


def test_a_hung_server_is_replaced_but_not_while_suspended(start: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = start(plain_flags(tmp_path))
    (url,) = fleet.urls()
    (pid,) = server_pids(fleet, url)
    with fleet.suspended():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)  # two checks of one second and their intervals would be over
        assert fleet.serving() == (url,)
        assert fleet.restarts() == 0
    eventually(lambda: fleet.restarts() == 1 and fleet.serving() == (url,))
    assert gone(pid)


def test_a_condemned_server_is_replaced(start: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = start(plain_flags(tmp_path))
    (url,) = fleet.urls()
    (pid,) = server_pids(fleet, url)
    fleet.leave(url, "its weights are half loaded")
    assert fleet.serving() == ()
    eventually(lambda: fleet.serving() == (url,))
    assert gone(pid)


def test_weights_that_cannot_be_brought_keep_it_out_until_it_is_given_up(
    start: Callable[..., Fleet], tmp_path: Path
) -> None:
    fleet = start(plain_flags(tmp_path), watch=replace(WATCH, max_restarts=1))
    (url,) = fleet.urls()

    def refuse(url: str) -> None:
        raise InfrastructureError("engine_status_400", "no such folder")

    fleet.bring_up = refuse
    fleet.leave(url, "test")
    eventually(lambda: fleet.restarts() == 2)
    time.sleep(0.2)
    assert fleet.serving() == ()


def test_a_server_that_cannot_start_is_quoted_and_the_others_end(start: Callable[..., Fleet], tmp_path: Path) -> None:
    source = "import sys\nif '1009' in sys.argv: sys.exit('no such model here')\n" + PLAIN
    with pytest.raises(InfrastructureError, match=r"(?s)server 1 .* ended with code 1.*no such model here") as caught:
        start(plain_flags(tmp_path, source), 2)
    assert caught.value.cause == "engine_start"


def test_a_start_has_a_deadline(start: Callable[..., Fleet], tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"(?s)not ready after 1 s.*thinking"):
        start(
            plain_flags(tmp_path, "print('thinking')\nimport time\ntime.sleep(60)"),
            watch=replace(WATCH, start_timeout_s=1),
        )


def test_a_server_is_ready_when_it_has_generated_and_not_before(start: Callable[..., Fleet], tmp_path: Path) -> None:
    """The first request compiles for half a minute; a sync that meets it would take the server for a hung one."""
    slow = PLAIN.replace("def do_POST(self):", "def do_POST(self):\n        import time; time.sleep(1.5)")
    began = time.monotonic()
    assert len(start(plain_flags(tmp_path, slow)).serving()) == 1
    assert time.monotonic() - began > 1.5
    with pytest.raises(InfrastructureError, match="not ready after 3 s"):
        start(plain_flags(tmp_path, slow.replace("1.5", "30")), watch=replace(WATCH, start_timeout_s=3))


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(500, b"kernel image missing", "HTTP 500 kernel image missing"), (200, b"{}", "output_ids")],
)
def test_a_server_that_generates_nothing_cannot_start(
    start: Callable[..., Fleet], tmp_path: Path, status: int, body: bytes, said: str
) -> None:
    broken = PLAIN.replace(
        """send_response(200); self.end_headers(); self.wfile.write(b'{"out""",
        f"""send_response({status}); self.end_headers(); self.wfile.write({body!r}); 0 and (b'{{"out""",
    )
    with pytest.raises(InfrastructureError, match=f"generates nothing: .*{said}"):
        start(plain_flags(tmp_path, broken))


def test_a_log_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "logs" / "sglang-1.log").mkdir(parents=True)
    fleet = Fleet(launches(plain_flags(tmp_path), claim_ports(2, 0).pairs, []), tmp_path / "logs", WATCH)
    with pytest.raises(InfrastructureError, match=r"engine_start: server 1: .*Is a directory"):
        fleet.start()


@pytest.mark.parametrize(
    "problem", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("CUDA out of memory"), KeyError("a bug")]
)
def test_whatever_fails_in_a_bring_up_costs_one_restart(
    start: Callable[..., Fleet], tmp_path: Path, problem: Exception
) -> None:
    """An error that was not thought of ended the server's thread: it was neither started again nor given up."""
    fleet = start(plain_flags(tmp_path))
    problems = [problem]

    def bring_up(url: str) -> None:
        if problems:
            raise problems.pop()

    fleet.bring_up = bring_up
    fleet.leave(fleet.urls()[0], "a test")
    eventually(lambda: not problems and fleet.serving() == fleet.urls())
    assert fleet.restarts() == 2


def test_a_port_that_somebody_took_before_the_start_is_told(tmp_path: Path) -> None:
    """Whoever listened there was taken for the run's own server, and would have been given its weights."""
    ports = claim_ports(1, 0)
    fleet = Fleet(launches(plain_flags(tmp_path), ports.pairs, []), tmp_path / "logs", WATCH)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.pairs[0][0]))
        taken.listen()
        with pytest.raises(InfrastructureError, match=r"engine_start: server 0: port \d+ on 127.0.0.1 cannot be used"):
            fleet.start()


def test_a_port_that_somebody_takes_while_a_server_loads_is_told(tmp_path: Path) -> None:
    ports = claim_ports(1, 0)
    flags = plain_flags(tmp_path, "print('loading')\nimport time\ntime.sleep(100)")
    other = tmp_path / "other.py"
    other.write_text(PLAIN.replace('wfile.write(b"{}")', "wfile.write(b'{\"nccl_port\": 7}')"))
    fleet = Fleet(launches(flags, ports.pairs, []), tmp_path / "logs", replace(WATCH, max_restarts=0))
    fleet.begin()
    log = tmp_path / "logs" / "sglang-0.log"
    eventually(lambda: log.is_file() and "loading" in log.read_text().splitlines())
    foreign = subprocess.Popen([sys.executable, str(other), "--port", str(ports.pairs[0][0])])
    try:
        with pytest.raises(InfrastructureError, match=rf"somebody else's .* port 7 and not {ports.pairs[0][1]}"):
            fleet.start()
    finally:
        foreign.kill()
        foreign.wait()


def test_a_listener_that_fails_costs_no_server(start: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = start(plain_flags(tmp_path))
    told: list[tuple[str, ...]] = []

    def tell(serving: tuple[str, ...]) -> None:
        told.append(serving)
        raise RuntimeError("can't start new thread")

    fleet.on_change(tell)
    (pid,) = server_pids(fleet, fleet.urls()[0])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: told == [(), fleet.urls()] and gone(pid))
    assert fleet.serving() == fleet.urls()


def test_servers_are_asked_directly_whatever_proxy_a_cluster_has(
    start: Callable[..., Fleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every question went to http_proxy, which knows no servers of ours: no start ever ended."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    fleet = start(plain_flags(tmp_path))
    (url,) = fleet.urls()
    (pid,) = server_pids(fleet, url)
    fleet.leave(url, "a test")
    eventually(lambda: gone(pid) and fleet.serving() == (url,))


# A server whose child has left its process group, as a tensor-parallel rank might.
WITH_CHILD = "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n" + PLAIN
DRIVER = """
import sys, time
from pathlib import Path
from rl360.serving.command import ServerFlags, launches
from rl360.serving.fleet import Fleet
from rl360.serving.ports import claim_ports
flags = ServerFlags(Path("."), 64, command=(sys.executable, sys.argv[1]))
fleet = Fleet(launches(flags, claim_ports(1, 0).pairs, []), Path(sys.argv[2]))
fleet.start()
print(fleet.pid(fleet.urls()[0]), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["driver", "keeper"])
def test_nothing_survives_a_killed_driver_or_keeper(tmp_path: Path, victim: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(WITH_CHILD if victim == "driver" else PLAIN)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(script), str(tmp_path / "logs")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        keeper = int(driver.stdout.readline())
        (server,) = [int(p) for p in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]
        below = [int(p) for p in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
        assert len(below) == (victim == "driver")
        os.kill(driver.pid if victim == "driver" else keeper, signal.SIGKILL)
        eventually(lambda: all(gone(pid) for pid in (server, *below)))
        if victim == "driver":
            eventually(lambda: gone(keeper))
    finally:
        driver.kill()
        driver.wait()


def test_python_of_a_command_is_the_one_that_runs_this(
    start: Callable[..., Fleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that is used without being activated: another `python` is on PATH, without our packages."""
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho another python; exit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    fleet = start(replace(plain_flags(tmp_path), command=("python", str(tmp_path / "server.py"))))
    assert len(fleet.serving()) == 1
