"""A run whose servers ask for a key: the key works through servers, gateway and weight sync, and is written nowhere."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess

import pytest

from rl360.diagnostics.recount import recount
from tests.e2e.test_run_fleet import arguments, environment, processes, wait_for_a_row
from tests.e2e.test_run_tiny import ROOT, RUN_TIMEOUT_S
from tests.serving.test_secrets import nobody_is_told

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


@pytest.mark.parametrize(("gateway", "sync"), [("direct", "ipc"), ("smg", "disk")])
def test_a_key_is_in_no_file_of_a_run_and_on_no_command_line(gateway, sync, tiny_llama_dir, tmp_path):
    """With a server that is killed, so that there is a second start."""
    out, key, temporary = tmp_path / "run", secrets.token_hex(8), tmp_path / "temporary"
    temporary.mkdir()
    with nobody_is_told(key):
        run = subprocess.Popen(
            arguments(
                tiny_llama_dir, out, sync, "iterations=3", f"gateway={gateway}", "gateway.api_key_env=MY_ENGINE_KEY",
                "rollout.request_timeout_s=100",
            ),
            env={**environment(tmp_path), "MY_ENGINE_KEY": key, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )  # fmt: skip
        try:
            wait_for_a_row(run, out)
            os.kill(processes(str(tmp_path), "rl360.gateway.embedded.serve")[-1], signal.SIGKILL)
            text, _ = run.communicate(timeout=RUN_TIMEOUT_S)
            assert run.returncode == 0, text
        finally:
            run.kill()
    assert key not in text
    assert json.loads((out / "summary.json").read_text())["attempts"]["masked"] == 0
    assert recount(out).problems == []
    log = (out / "logs" / "sglang-0.log").read_text()
    assert log.count("the embedded engine serves") == 2
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert out / "resolved.yaml" in files
    assert [file for file in files if key.encode() in file.read_bytes()] == []
    assert list(temporary.glob("rl360-key-*")) == []
