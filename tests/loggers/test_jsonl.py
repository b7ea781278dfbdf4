"""metrics.jsonl: a row an iteration, also after a crash and a resume."""

from __future__ import annotations

import json
import math

import pytest

from rl360.loggers.jsonl import JsonlLogger


def started(folder) -> JsonlLogger:
    logger = JsonlLogger()
    logger.start(folder, {})
    return logger


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_row_an_iteration_whoever_logs_it(tmp_path):
    logger = started(tmp_path)
    logger.log(0, {"train/loss": 0.5})
    logger.log(1, {"eval/success_rate": 0.25})
    logger.log(1, {"train/loss": 0.25})
    logger.log(1, {"train/loss": 0.125, "time/step_s": 2})
    assert rows(tmp_path) == [
        {"iteration": 0, "train/loss": 0.5},
        {"iteration": 1, "eval/success_rate": 0.25, "train/loss": 0.125, "time/step_s": 2.0},
    ]


def test_what_json_lacks_is_null(tmp_path):
    started(tmp_path).log(0, {"a": math.nan, "b": math.inf, "c": 1e-300})
    assert rows(tmp_path) == [{"iteration": 0, "a": None, "b": None, "c": 1e-300}]


def test_a_resume_removes_later_rows_and_keeps_the_evaluation_of_its_own(tmp_path):
    logger = started(tmp_path)
    for i in range(4):
        logger.log(i, {"train/loss": float(i)})
        logger.log(i + 1, {"eval/success_rate": i / 10})
    again = started(tmp_path)
    again.log(2, {"train/loss": 20.0})
    again.log(3, {"train/loss": 30.0})
    assert rows(tmp_path) == [
        {"iteration": 0, "train/loss": 0.0},
        {"iteration": 1, "eval/success_rate": 0.0, "train/loss": 1.0},
        {"iteration": 2, "eval/success_rate": 0.1, "train/loss": 20.0},
        {"iteration": 3, "train/loss": 30.0},
    ]


def test_a_row_that_is_made_again_keeps_nothing_but_the_evaluation(tmp_path):
    """Else three attempts stay masked by a cause that no attempt of the new row has, and a skipped step has a loss."""
    logger = started(tmp_path)
    logger.log(1, {"eval/success_rate": 0.5, "eval/task/a/success_rate": 0.5})
    logger.log(1, {"train/loss": 0.2, "rollout/samples_masked": 3, "rollout/masked/engine_timeout": 3})
    started(tmp_path).log(1, {"train/skipped": 1, "rollout/samples_masked": 0})
    assert rows(tmp_path) == [
        {
            "iteration": 1,
            "eval/success_rate": 0.5,
            "eval/task/a/success_rate": 0.5,
            "train/skipped": 1.0,
            "rollout/samples_masked": 0.0,
        }
    ]
    again = started(tmp_path)  # an evaluation that is made again is whole: nobody gave a verdict on task a this time
    again.log(1, {"eval/success_rate": 0.25, "eval/task/b/success_rate": 0.25})
    again.log(1, {"train/loss": 0.1})
    assert rows(tmp_path) == [
        {"iteration": 1, "eval/success_rate": 0.25, "eval/task/b/success_rate": 0.25, "train/loss": 0.1}
    ]


def test_a_resume_that_logs_nothing_changes_nothing(tmp_path):
    started(tmp_path).log(0, {"a": 1})
    started(tmp_path).finish({})
    assert rows(tmp_path) == [{"iteration": 0, "a": 1.0}]


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_torn_last_row_is_dropped(tmp_path, cut):
    logger = started(tmp_path)
    logger.log(0, {"train/loss": 0.5})
    logger.log(1, {"train/loss": 0.25})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    started(tmp_path).log(1, {"train/loss": 0.75})
    assert rows(tmp_path) == [{"iteration": 0, "train/loss": 0.5}, {"iteration": 1, "train/loss": 0.75}]
