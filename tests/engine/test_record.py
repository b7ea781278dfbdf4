"""The end of a run, told to loggers that fail or do not come back."""

from __future__ import annotations

import threading

from rl360.engine import record
from rl360.engine.record import RunRecord


class Recorder:
    def __init__(self, finish=lambda summary: None):
        self.summaries = []
        self._finish = finish

    def finish(self, summary):
        self._finish(summary)
        self.summaries.append(summary)


def fails(summary):
    raise ConnectionError("no such service")


def test_every_logger_is_told_of_the_end_whatever_another_does(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(record, "FINISH_S", 0.2)
    never = threading.Event()
    last = Recorder()
    run = RunRecord(tmp_path, [Recorder(fails), Recorder(lambda summary: never.wait()), last])
    run.finish({"exit_reason": "finished"})
    assert last.summaries == [{"exit_reason": "finished"}]
    said = [line.getMessage() for line in caplog.records]
    assert said == [
        "logger Recorder did not finish: ConnectionError: no such service",
        "logger Recorder did not finish: no answer for 0.2 s",
    ]
    never.set()
    run.close()
