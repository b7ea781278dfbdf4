"""Stages of a benchmark: a file after each, also when the program is cut off; a kernel's time within a limit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import roofline
from benchmarks.progress import Progress

PROGRAM = """
import os, signal, sys
from pathlib import Path
from benchmarks.progress import Progress, end_on_sigterm

found = {"case": 1}
progress = Progress(found, Path(sys.argv[1]))
end_on_sigterm()
with progress.stage("quick"):
    found["case"] = 2
with progress.stage("long"):
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


def test_the_file_is_complete_after_each_stage(tmp_path, capfd):
    path = tmp_path / "found.json"
    found = {"layers": 4}
    progress = Progress(found, path)
    with progress.stage("start"):
        assert not path.exists()
        found["more"] = [1]
    written = json.loads(path.read_text())
    assert (written["layers"], written["more"], list(written["stages_s"])) == (4, [1], ["start"])
    with pytest.raises(ZeroDivisionError), progress.stage("work"):
        raise ZeroDivisionError
    assert json.loads(path.read_text())["ended_in"].startswith("work: ZeroDivisionError after ")
    lines = [line.split("] ", 1)[1] for line in capfd.readouterr().err.splitlines()]
    assert lines[0] == "start ..."
    assert lines[1].startswith("start: ")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_program_that_is_ended_leaves_what_it_had(tmp_path):
    path = tmp_path / "found.json"
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], env=environment, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    written = json.loads(path.read_text())
    assert written["case"] == 2
    assert list(written["stages_s"]) == ["quick"]
    assert written["ended_in"].startswith("long: SystemExit")


@pytest.mark.parametrize(
    ("run_ms", "counted"),
    [(1.0, 10), (300.0, 10), (900.0, 3), (5000.0, 1)],  # of a limit of 4 s, one run is spent on finding out
)
def test_a_long_kernel_is_repeated_less(monkeypatch, run_ms, counted):
    clock = {"ms": 0.0, "runs": 0}
    measured = []

    class Event(SimpleNamespace):
        def record(self):
            self.at, self.runs = clock["ms"], clock["runs"]

        def elapsed_time(self, end):
            measured.append(end.runs - self.runs)
            return end.at - self.at

    def run():
        clock["runs"] += 1
        clock["ms"] += run_ms + (15_000.0 if clock["runs"] == 1 else 0.0)  # the first compiles

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert roofline.timed_ms(run) == pytest.approx(run_ms)
    assert measured[-1] == counted
