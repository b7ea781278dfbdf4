"""`rl360 view` as a command."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from rl360 import cli
from tests.viewer.runs import write_run


def test_it_serves_until_it_is_stopped(tmp_path):
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-c", "import sys; from rl360.cli import main; sys.exit(main())", "view", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert "demo" in answer.read().decode()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors == ""


@pytest.mark.parametrize(("folder", "said"), [("none", "no such folder"), ("empty", "not a run folder")])
def test_what_is_not_a_run_is_said(tmp_path, capsys, folder, said):
    (tmp_path / "empty").mkdir()
    assert cli.main(["view", str(tmp_path / folder)]) == 1
    assert said in capsys.readouterr().err


def test_a_taken_port_is_said(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert cli.main(["view", str(run), "--port", str(other.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_a_port_that_is_none_is_said(tmp_path, capsys, port):
    with pytest.raises(SystemExit) as ended:
        cli.main(["view", str(write_run(tmp_path / "run")), f"--port={port}"])
    assert ended.value.code == 2
    assert f"argument --port: {port}; expected a number from 0 to 65535" in capsys.readouterr().err
