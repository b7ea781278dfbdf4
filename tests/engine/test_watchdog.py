"""A run that stands still names the stage and ends; one that moves, or is paused, goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl360.engine.watchdog import EXIT_CODE, Watchdog


class Ended:
    """Stands for the process's end."""

    def __init__(self) -> None:
        self.code: int | None = None

    def __call__(self, code: int) -> None:
        self.code = code

    def within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.code is not None


def test_a_stall_names_stage_and_whom_it_waits_for(tmp_path):
    ended, told, killed = Ended(), [], []
    dog = Watchdog(
        0.3,
        lambda: "3 open tries (i0-a-1.t0)",
        log_dir=tmp_path,
        kill_children=lambda: killed.append(True),
        on_stall=told.append,
        end=ended,
    )
    with dog, dog.stage("iteration"), dog.stage("rollout"):
        assert ended.within(5)
    assert ended.code == EXIT_CODE == 75
    assert killed == [True]
    (message,) = told
    assert "in stage iteration > rollout; waiting for: 3 open tries (i0-a-1.t0)" in message
    text = (tmp_path / "watchdog.log").read_text()
    assert message in text
    assert "test_a_stall_names_stage_and_whom_it_waits_for" in text  # the stack of the thread that waits


def test_progress_stage_changes_and_pauses_keep_a_run_alive(tmp_path):
    ended = Ended()
    with Watchdog(0.4, lambda: "", log_dir=tmp_path, end=ended) as dog:
        for _ in range(4):
            time.sleep(0.15)
            dog.progress()
        for _ in range(4):
            with dog.stage("short"):
                time.sleep(0.15)
        with dog.paused():
            time.sleep(0.8)
        time.sleep(0.15)
    assert ended.code is None


def test_a_stage_left_by_an_error_is_left(tmp_path):
    ended, told = Ended(), []
    with Watchdog(0.2, lambda: "x", log_dir=tmp_path, on_stall=told.append, end=ended) as dog:
        with pytest.raises(ValueError, match="boom"), dog.stage("failing"):
            raise ValueError("boom")
        assert ended.within(5)
    assert "in stage between stages" in told[0]


def test_zero_never_ends_a_run(tmp_path):
    with Watchdog(0, lambda: "", log_dir=tmp_path, end=Ended()) as dog, dog.stage("any"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_callbacks_that_fail_or_hang_do_not_keep_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rl360.engine.watchdog.CALLBACK_S", 0.2)
    ended = Ended()

    def fail() -> str:
        raise RuntimeError("no answer")

    dog = Watchdog(
        0.2, fail, log_dir=tmp_path, kill_children=lambda: time.sleep(30), on_stall=lambda _: time.sleep(30), end=ended
    )
    with dog, dog.stage("rollout"):
        assert ended.within(5)
    assert "waiting for: no answer to whom it waits for" in (tmp_path / "watchdog.log").read_text()


STALLED = """
import subprocess, sys, time
from pathlib import Path
from rl360.engine.watchdog import Watchdog
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
dog = Watchdog(0.5, lambda: "engine 1", log_dir=Path(sys.argv[1]), kill_children=child.kill)
dog.start()
with dog.stage("train"):
    {stall}
"""


@pytest.mark.parametrize("stall", ["time.sleep(60)", "while True: pass"])
def test_a_stalled_process_ends_with_75(tmp_path, stall):
    code = STALLED.format(stall=stall)
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_CODE
    assert "no progress for" in done.stderr
    assert "stage train; waiting for: engine 1" in done.stderr
    assert 'File "<string>"' in (tmp_path / "watchdog.log").read_text()


def leave_no_room(folder: Path) -> str:
    (folder / "watchdog.log").symlink_to("/dev/full")
    return ""


def leave_no_folder(folder: Path) -> str:
    (folder / "logs").write_text("a file")
    return "sys.argv[1] += '/logs'"


def close_the_terminal(folder: Path) -> str:
    return "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 2)"


def stop_reading_the_terminal(folder: Path) -> str:
    return "import os, fcntl; r, w = os.pipe(); os.write(w, bytes(fcntl.fcntl(w, 1032))); os.dup2(w, 2)"  # F_GETPIPE_SZ


def allow_no_thread(folder: Path) -> str:
    return (
        "import threading; real = threading.Thread.start\n"
        "def start(self):\n"
        "    if self.name != 'watchdog': raise RuntimeError(\"can't start new thread\")\n"
        "    real(self)\n"
        "threading.Thread.start = start"
    )


def leave_no_folder_and_stop_reading(folder: Path) -> str:
    """As a disk does that holds the run's folder, and the file of a `tee` behind the run."""
    return f"{leave_no_folder(folder)}; {stop_reading_the_terminal(folder)}"


def leave_no_room_and_stop_reading(folder: Path) -> str:
    return leave_no_room(folder) + stop_reading_the_terminal(folder)


@pytest.mark.parametrize(
    "trouble",
    [
        leave_no_room,
        leave_no_folder,
        close_the_terminal,
        stop_reading_the_terminal,
        leave_no_folder_and_stop_reading,
        leave_no_room_and_stop_reading,
        allow_no_thread,
    ],
)
def test_what_a_run_hangs_in_does_not_keep_the_end_from_coming(tmp_path, trouble):
    """Each of these once ended the watchdog's own thread, and the run stood still for good."""
    code = (
        f"import sys, time\n{trouble(tmp_path)}\n"
        "import rl360.engine.watchdog as module\nmodule.CALLBACK_S = 1.0\nfrom pathlib import Path\n"
        "with module.Watchdog(0.5, lambda: 'engine 1', log_dir=Path(sys.argv[1])) as dog, dog.stage('train'):\n"
        "    time.sleep(600)\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == EXIT_CODE, done.stderr
    if trouble in (leave_no_room, leave_no_folder):
        assert "stage train; waiting for: engine 1" in done.stderr
        assert 'File "<string>"' in done.stderr  # the stacks that had no other place


STUCK_IN_C = """
import ctypes, sys
from pathlib import Path
import rl360.engine.watchdog as module
module.CALLBACK_S, module.BACKSTOP_FACTOR = 0.1, 1.0
dog = module.Watchdog(0.5, lambda: "nobody", log_dir=Path(sys.argv[1]))
dog.start()
import time; time.sleep(0.3)
ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter lock
"""


def test_a_process_stuck_in_c_code_with_the_lock_ends_too(tmp_path):
    env = {"PYTHONPATH": ":".join(sys.path)}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK_IN_C, str(tmp_path)], env=env, timeout=50, check=False)
    assert done.returncode != 0
    assert time.monotonic() - began < 20
    assert "Timeout" in (tmp_path / "watchdog.log").read_text()
