"""What of a generation's time is sampling, by hand."""

from __future__ import annotations

import pytest

from rl360.gateway.pace import MIN_KNOWN, MIN_TOKENS, MOST_SLOWDOWN, WINDOW, Pace


def known(seconds_a_token: float, count: int = MIN_KNOWN, tokens: int = 100) -> Pace:
    pace = Pace()
    for _ in range(count):
        pace.add(tokens, seconds_a_token * tokens)
    return pace


def test_before_enough_is_known_all_of_it_is_waiting() -> None:
    assert known(0.02, MIN_KNOWN - 1).sampling_s(500, 10.0) == 0.0
    assert known(0.02, MIN_KNOWN).sampling_s(500, 10.0) == pytest.approx(10.0)


def test_short_generations_tell_no_pace() -> None:
    assert known(0.02, 100, tokens=MIN_TOKENS - 1).sampling_s(500, 10.0) == 0.0


def test_a_long_answer_is_sampling_and_a_queue_is_not() -> None:
    """At 0.02 s a token 500 tokens take 10 s, however long the request took; 5 tokens take 0.1 s."""
    pace = known(0.02)
    assert pace.sampling_s(500, 10.0) == pytest.approx(10.0)
    assert pace.sampling_s(500, 70.0) == pytest.approx(10.0)
    assert pace.sampling_s(5, 60.0) == pytest.approx(0.1)
    assert pace.sampling_s(500, 4.0) == 4.0  # faster than it was: never more than it took


def test_requests_that_queued_do_not_set_the_pace() -> None:
    """Nine in ten waited as long again; the tenth that did not tells the pace."""
    pace = Pace()
    for number in range(100):
        pace.add(100, 2.0 if number % 10 == 0 else 4.0)
    assert pace.sampling_s(100, 4.0) == pytest.approx(4.0)  # 10 of 100 are the fastest tenth; the next is not
    for _ in range(2):
        pace.add(100, 2.0)
    assert pace.sampling_s(100, 4.0) == pytest.approx(2.0)


def test_more_load_is_a_slower_pace_and_trouble_is_not() -> None:
    pace = known(0.01, WINDOW)
    for _ in range(WINDOW):
        pace.add(100, 100 * 0.03)
    assert pace.sampling_s(1000, 30.0) == pytest.approx(30.0)
    for _ in range(WINDOW):
        pace.add(100, 100 * 1.0)  # a hundred times slower than it was
    assert pace.sampling_s(1000, 1000.0) == pytest.approx(1000 * 0.01 * MOST_SLOWDOWN)
