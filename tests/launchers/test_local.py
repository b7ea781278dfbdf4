"""The local launcher: exit codes, and that no user error shows a traceback."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launchers.local import exit_code, run_folder
from rl360.config.compose import Request, compose
from rl360.config.run_folder import save
from rl360.errors import ConfigError, EngineError, Interrupted


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """Run a saved folder with `run_experiment` replaced; returns the exit code and what it was called with."""

    def run(behaviour) -> tuple[int, list]:
        calls: list = []

        def run_experiment(config, resolved):
            calls.append((config, resolved))
            if isinstance(behaviour, BaseException):
                raise behaviour
            return behaviour

        module = types.ModuleType("rl360.engine.run")
        module.run_experiment = run_experiment  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rl360.engine.run", module)
        save(tmp_path, {**compose(Request(("seed=5",))).values, "output_dir": str(tmp_path)}, {})
        return run_folder(tmp_path), calls

    return run


def test_the_run_gets_the_typed_config_of_its_own_folder(run_with, tmp_path):
    code, calls = run_with({"exit_reason": "finished"})
    assert code == 0
    config, resolved = calls[0]
    assert (config.seed, config.output_dir) == (5, str(tmp_path))
    assert config.reward["format_penalty"].kwargs == {"penalty": 0.3}
    assert OmegaConf.select(resolved, "reward.format_penalty.penalty") == 0.3


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        (Interrupted("SIGTERM"), 130, "continue with: rl360 run resume="),
        (ConfigError(["a: wrong", "b: wrong"]), 1, "a: wrong\nb: wrong"),
        (EngineError("engine_timeout", "no answer"), 1, "engine_timeout: no answer; logs are in"),
    ],
)
def test_what_ends_a_run_is_said_in_a_line(run_with, capsys, behaviour, code, said):
    assert run_with(behaviour)[0] == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"exit_reason": "finished"}, 0),
        ({"exit_reason": "time_limit"}, 0),
        ({"exit_reason": "interrupted"}, 130),
        ({"exit_reason": "failed"}, 1),
        ({}, 1),
        (3, 3),
        (None, 0),
    ],
)
def test_exit_codes(outcome, code):
    assert exit_code(outcome) == code


def test_a_saved_config_that_no_longer_fits_is_reported(tmp_path, capsys):
    save(tmp_path, {**compose(Request()).values, "stepz": 1}, {})
    assert run_folder(Path(tmp_path)) == 1
    assert "stepz: unknown key" in capsys.readouterr().err


def test_a_sigterm_is_passed_on_so_that_a_point_ends_in_its_own_time():
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    parent = (
        "import os, signal, sys, threading\n"
        "from launchers.local import _child\n"
        "threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        f"sys.exit(_child((sys.executable, '-c', {code!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (130, "ready\n"), done.stderr
