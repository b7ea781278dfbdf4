"""What a person sees, on a terminal and in a log file."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from rl360.loggers.console import ConsoleLogger

SUMMARY = {
    "exit_reason": "finished",
    "iterations": 10,
    "reward_first": 0.3,
    "reward_last": 0.8125,
    "success_rate_first": 0.375,
    "success_rate_last": 0.84375,
    "attempts": {"started": 340, "trained": 250, "filtered": 64, "masked": 6, "requeued": 4, "evaluated": 16},
    "masked_by_cause": {"sandbox_died": 6},
    "wall_s": 3723.4,
    "step_s_median": 11.52,
}


def show(live: bool, folder: Path = Path("outputs/quick start/1")) -> str:
    out = io.StringIO()
    logger = ConsoleLogger(Console(file=out, force_terminal=live, width=110), live=live)
    logger.start(folder, {"iterations": 10})
    for i in range(3):
        logger.log(
            i, {"time/step_s": 10.0 + i, "reward/unfiltered_mean": 0.5, "reward/success_rate": 0.25 * i, "x": 1.0}
        )
    logger.log(3, {"eval/success_rate": 0.625})
    logger.finish(SUMMARY)
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = show(live=False).splitlines()
    assert "iteration 1/10  reward 0.500  success 0.000  step 10.0 s  left 1:30" in lines
    assert "iteration 3/10  reward 0.500  success 0.500  step 12.0 s  left 1:17" in lines  # median 11 s, 7 to go
    assert "evaluation at iteration 3: success 0.625" in lines
    assert not any("\x1b" in line for line in lines)


def test_the_end_says_what_was_reached_and_how_to_look_at_it():
    text = show(live=False)
    assert "finished after 10 iterations" in text
    for shown in ("0.300", "0.812", "0.375", "0.844", "340", "250 trained, 64 filtered, 6 masked, 4 requeued"):
        assert shown in text
    assert "6 sandbox_died" in text
    assert "1:02:03" in text
    assert "11.5 s an iteration" in text
    assert "tensorboard --logdir 'outputs/quick start/1'" in text


def test_a_terminal_gets_a_bar_and_its_cursor_back():
    text = show(live=True)
    assert "3/10" in text
    assert "success 0.500" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # hidden once, shown once


def test_numbers_that_are_missing_are_dashes():
    out = io.StringIO()
    logger = ConsoleLogger(Console(file=out, width=100), live=False)
    logger.start(Path("run"), {"iterations": 2})
    logger.log(0, {"time/step_s": 1.0})
    logger.finish({"exit_reason": "failed", "iterations": 1, "reward_first": None})
    assert "iteration 1/2  reward -  success -  step 1.0 s  left 0:01" in out.getvalue()
    assert "failed after 1 iterations" in out.getvalue()
