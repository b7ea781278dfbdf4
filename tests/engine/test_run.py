"""What a run leaves when it ends before its loop begins."""

from __future__ import annotations

import json
import os
import signal

import pytest
from omegaconf import OmegaConf

from rl360.config.schemas import RootConfig
from rl360.engine import run
from rl360.engine.ledger import Ledger
from rl360.errors import CheckpointError, Interrupted
from tests.engine.records import make_spec
from tests.engine.test_summary import write_run


def test_a_resume_that_fails_before_it_knows_where_to_go_on_keeps_the_runs_numbers(tmp_path, monkeypatch):
    """A damaged checkpoint, say: the summary said that nothing had been trained, and had no reward."""
    write_run(tmp_path, [[0.0, 0.5], [1.0, 0.5]]).close()

    def damaged(*args, **rest):
        raise CheckpointError("trainer.pt: its bytes are not those that were saved")

    monkeypatch.setattr(run.CheckpointStore, "latest", damaged)
    monkeypatch.setattr(run, "build_tasks", lambda config: ([], []))
    monkeypatch.setattr(run, "TaskCursor", lambda tasks, seed: None)
    with pytest.raises(CheckpointError, match="its bytes"):
        run.run_experiment(RootConfig(output_dir=str(tmp_path)), OmegaConf.create({}))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["iterations"]) == ("failed", 2)
    assert (summary["reward_first"], summary["reward_last"], summary["success_rate_last"]) == (0.25, 0.75, 0.25)
    assert summary["attempts"]["trained"] == 4


def test_the_time_of_a_killed_process_counts(tmp_path, monkeypatch):
    """It leaves no summary, and took away that of the process before it: 3 h and 1 h were no time at all."""
    clock = iter([0.0, 10800.0, 90000.0, 93600.0])
    with monkeypatch.context() as patch:
        patch.setattr("rl360.engine.ledger.time.time", lambda: next(clock))
        for member in range(2):
            with Ledger(tmp_path / "ledger.jsonl") as ledger:
                ledger.rollback(0)
                ledger.started(make_spec(member=member))

    def train(*args, **rest):
        """At once."""

    monkeypatch.setattr(run, "_train", train)
    config = RootConfig(output_dir=str(tmp_path))
    for _ in range(2):  # the second one goes by the summary of the first
        wall_s = run.run_experiment(config, OmegaConf.create({}))["wall_s"]
        assert 14400.0 <= wall_s < 14400.0 + 600.0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_that_native_code_swallowed_is_still_one(signum):
    """safetensors: ValueError("could not determine the shape of object type ...") where a signal had come."""

    def swallowed():
        try:
            os.kill(os.getpid(), signum)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    def at_the_start():
        with run._stop_signals() as stop, stop.at_once("while the run started"):
            swallowed()

    def twice():
        with run._stop_signals() as stop:
            os.kill(os.getpid(), signum)
            assert stop.asked.is_set()
            swallowed()

    def between_two_steps():
        with run._stop_signals():
            os.kill(os.getpid(), signum)
            raise Interrupted("asked to stop in iteration 3")

    def of_its_own():
        with run._stop_signals():
            raise ValueError("of its own")

    with pytest.raises(KeyboardInterrupt, match=f"{signum.name} while the run started") as caught:
        at_the_start()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyboardInterrupt, match=f"{signum.name} for the second time"):
        twice()
    with pytest.raises(Interrupted):
        between_two_steps()
    with pytest.raises(ValueError, match="of its own"):
        of_its_own()
