"""A key on its way to the servers: in a file of this user's alone, and in nothing that is written or shown of them."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rl360.errors import InfrastructureError
from rl360.serving.command import ServerFlags, launches
from rl360.serving.fleet import Fleet
from rl360.serving.ports import claim_ports
from rl360.serving.secrets import KeyFile, Redactor, is_secret_flag, shown
from tests.serving.test_fleet import EMBEDDED, PLAIN, WATCH, eventually, gone, plain_flags, server_pids
from tests.tiny_model import write_tiny_llama

# Reads its key as SGLang does, and says it: in one piece, then in two with the first one on its own in the pipe.
TELLS = """
import json, sys, time
from pathlib import Path
key = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["api-key"]
print(f"server_args=ServerArgs(api_key={key!r})", flush=True)
sys.stdout.write("half " + key[:5]); sys.stdout.flush(); time.sleep(0.3)
print(key[5:], "whole", flush=True)
"""


@contextmanager
def nobody_is_told(key: str) -> Iterator[None]:
    """No command line of any process of this machine has it, whenever one looks."""
    told: set[bytes] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    if key.encode() in (words := file.read_bytes()):
                        told.add(words)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert told == set()


def status(url: str, key: str | None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where key files are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_servers_ask_for_a_key_that_stands_nowhere(tmp_path: Path, temporary: Path) -> None:
    key = secrets.token_hex(8)
    flags = ServerFlags(
        write_tiny_llama(tmp_path / "model"),
        512,
        command=EMBEDDED,
        dtype="float32",
        extra_args=("--threads", "1", "--kv-cache-gib", "0.05", "--nobody-knows", "its-value"),
    )
    logs = tmp_path / "logs"
    fleet = Fleet(launches(flags, claim_ports(1, 0).pairs, []), logs, WATCH, key)
    brought: list[str] = []
    fleet.bring_up = brought.append
    with nobody_is_told(key):
        try:
            (url,) = fleet.start()
            assert list(temporary.iterdir()) == []  # once it is ready
            for life in range(2):
                assert status(f"{url}/server_info", key) == 200
                assert status(f"{url}/server_info", None) == status(f"{url}/model_info", key + "x") == 401
                assert status(f"{url}/health", None) == 200
                if life == 0:
                    os.kill(server_pids(fleet, url)[0], signal.SIGKILL)
                    eventually(lambda: brought == [url] and fleet.serving() == (url,))
        finally:
            fleet.close()
    text = (logs / "sglang-0.log").read_text()
    assert text.count("the embedded engine serves") == 2
    assert key not in text
    assert "--nobody-knows" in (ignored := next(line for line in text.splitlines() if "without meaning" in line))
    assert "its-value" not in ignored
    assert list(temporary.iterdir()) == []


def test_a_start_that_fails_quotes_its_log_without_the_key(tmp_path: Path, temporary: Path) -> None:
    key = secrets.token_hex(8)
    flags = plain_flags(tmp_path, TELLS + "sys.exit('no such model here')\n")
    fleet = Fleet(launches(flags, claim_ports(1, 0).pairs, []), tmp_path / "logs", WATCH, key)
    with nobody_is_told(key), pytest.raises(InfrastructureError) as caught:
        fleet.start()
    said = str(caught.value)
    assert "ServerArgs(api_key='...')" in said
    assert "half ... whole" in said
    assert "no such model here" in said
    assert key not in said
    assert key not in (tmp_path / "logs" / "sglang-0.log").read_text()
    assert list(temporary.iterdir()) == []


def test_a_key_does_not_outlive_a_driver_that_is_killed(tmp_path: Path) -> None:
    script, key_file = tmp_path / "server.py", KeyFile("a-key")
    script.write_text("print('up', flush=True)\nimport time\ntime.sleep(1000)\n")
    keeper = subprocess.Popen(
        [sys.executable, "-m", "rl360.serving.keeper", "5", str(key_file.path), "--", sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"up\n"
    assert key_file.path.is_file()
    keeper.communicate(timeout=60)  # closes the pipe, as the kernel does for a dead driver
    assert not key_file.path.parent.exists()


def test_a_key_does_not_outlive_a_keeper_that_is_killed(tmp_path: Path, temporary: Path) -> None:
    flags = plain_flags(tmp_path, "print('loading', flush=True)\nimport time\ntime.sleep(1000)\n" + PLAIN)
    watch = replace(WATCH, max_restarts=0)
    fleet = Fleet(launches(flags, claim_ports(1, 0).pairs, []), tmp_path / "logs", watch, "a-key")
    fleet.begin()
    log = tmp_path / "logs" / "sglang-0.log"
    eventually(lambda: log.is_file() and "loading" in log.read_text().splitlines())
    (server,) = server_pids(fleet, fleet.urls()[0])
    os.kill(fleet.pid(fleet.urls()[0]), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="ended with code -9"):
        fleet.start()
    assert list(temporary.iterdir()) == []
    eventually(lambda: gone(server))


def test_the_end_of_a_servers_output_is_in_its_log(tmp_path: Path) -> None:
    """It passes through a pipe: what a server says last is why it ended."""
    flags = plain_flags(tmp_path, "import sys\nsys.stdout.write('x' * 300_000 + ' the end a-ke')\nsys.exit(3)\n")
    fleet = Fleet(launches(flags, claim_ports(1, 0).pairs, []), tmp_path / "logs", WATCH, "a-key")
    with pytest.raises(InfrastructureError) as caught:
        fleet.start()
    assert "ended with code 3" in str(caught.value)
    assert str(caught.value).endswith("x the end a-ke")
    assert "x" * 300_000 in (tmp_path / "logs" / "sglang-0.log").read_text()


def test_a_key_file_is_for_this_user_alone_and_says_one_flag(temporary: Path) -> None:
    for key in ("12345", "yes", "a: b #c", '"\\n', "'x"):
        file = KeyFile(key)
        assert file.path.stat().st_mode & 0o777 == 0o600
        assert file.path.parent.stat().st_mode & 0o777 == 0o700
        assert yaml.safe_load(file.path.read_text()) == {"api-key": key}
        file.remove()
        file.remove()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("key", ["k-7be41fa902cc", "aaa", "abab", "a", "q\"uo'te\\d"])
def test_a_key_is_taken_out_however_the_stream_is_cut(key: str) -> None:
    rng = random.Random(key)
    forms = [key, repr(key)[1:-1], json.dumps(key)[1:-1]]
    parts = [rng.choice([*forms, key[: rng.randrange(len(key) + 1)], "-", "\n", key[0]]) for _ in range(400)]
    stream = "".join(parts).encode()
    assert key.encode() in stream
    for _ in range(30):
        redactor, at, out = Redactor(key), 0, b""
        while at < len(stream):
            size = rng.choice((1, 2, 3, 50))
            out += redactor.feed(stream[at : at + size])
            at += size
        out += redactor.rest()
        assert not any(form.encode() in out for form in forms)
        whole = Redactor(key)
        assert out == whole.feed(stream) + whole.rest()
        if len(set(forms)) == 1:
            assert out == stream.replace(key.encode(), b"...")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--api-key", "s3cret", "--last", "1"], "--api-key ... --last 1"),
        (["--api-key=s3cret", "--last"], "--api-key=... --last"),
        (["--admin-api-key", "s3cret"], "--admin-api-key ..."),
        (["--ap", "s3cret", "--admin=s3cret"], "--ap ... --admin=..."),
        (["--ssl-keyfile", "/a", "--ssl-keyfile-password", "s3cret"], "--ssl-keyfile /a --ssl-keyfile-password ..."),
        (["serve", "--port", "1", "--attention-backend", "x"], "serve --port 1 --attention-backend x"),
    ],
)
def test_a_command_is_shown_without_secrets(words: list[str], expected: str) -> None:
    assert shown(words) == expected


def test_what_names_a_secret() -> None:
    assert all(map(is_secret_flag, ("--api-key", "--api-key=x", "--api-k", "--admin-api-key", "--admin-api", "--ap=x")))
    assert not any(map(is_secret_flag, ("", "--", "-a", "--a", "--ssl-keyfile", "--ssl", "--api-key-file", "api-key")))
