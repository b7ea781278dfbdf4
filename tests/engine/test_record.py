"""The end of a run, told to loggers that fail or do not come back."""

from __future__ import annotations

import threading

from rl360.engine.record import RunRecord
from rl360.engine.watchdog import EXIT_CODE, Watchdog


class Recorder:
    def __init__(self, finish=lambda summary: None):
        self.summaries = []
        self._finish = finish

    def finish(self, summary):
        self._finish(summary)
        self.summaries.append((summary, threading.current_thread()))


def fails(summary):
    raise ConnectionError("no such service")


def test_every_logger_is_told_of_the_end_whatever_another_does(tmp_path, caplog):
    """In the thread in which it was told of the rest: a database is of one thread."""
    last = Recorder()
    run = RunRecord(tmp_path, [Recorder(fails), last])
    with Watchdog(60.0, lambda: "", log_dir=tmp_path) as watchdog:
        run.finish({"exit_reason": "finished"}, watchdog)
    assert last.summaries == [({"exit_reason": "finished"}, threading.current_thread())]
    said = [line.getMessage() for line in caplog.records]
    assert said == ["logger Recorder did not finish: ConnectionError: no such service"]
    run.close()


def test_a_logger_that_does_not_come_back_is_the_watchdogs(tmp_path):
    codes, ended = [], threading.Event()

    def end(code):
        codes.append(code)
        ended.set()  # instead of the process

    run = RunRecord(tmp_path, [Recorder(lambda summary: ended.wait(100.0))])
    with Watchdog(0.2, lambda: "a service", log_dir=tmp_path, end=end) as watchdog:
        run.finish({}, watchdog)
    assert codes == [EXIT_CODE]
    assert "in stage end of logger Recorder" in (tmp_path / "watchdog.log").read_text()
    run.close()
