"""The alarm on numbers made by hand: limits, what it says, a canary that is flat, drifts, or has other weights."""

from __future__ import annotations

import json
import logging

import pytest

from rl360.engine.mismatch import MismatchWatch, where_to_look
from rl360.errors import MismatchAlarm


def row(kl: float = 1e-4, difference: float = 0.01, ratio: float = 1.2, **more: float) -> dict[str, float]:
    return {"mismatch/kl": kl, "mismatch/logprob_diff_mean": difference, "mismatch/ratio_max": ratio, **more}


def test_below_the_limits_nothing_is_said(caplog):
    watch = MismatchWatch(max_kl=0.01, max_ratio=10.0, stop=True)
    assert watch.look(row()) == {"mismatch/alarm": 0.0}
    watch.raise_alarm()
    assert caplog.records == []


def test_an_alarm_warns_once_and_again_when_it_has_doubled(caplog):
    watch = MismatchWatch(max_kl=0.01)
    with caplog.at_level(logging.WARNING):
        for kl in (0.02, 0.021, 0.041, 0.001, 0.02):
            watch.look(row(kl))
            watch.raise_alarm()  # stop is off
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "mismatch/kl is 0.02", "mismatch/kl is 0.041", "mismatch/kl is 0.02",
    ]  # fmt: skip
    assert "mismatch.max_kl 0.01" in caplog.text


@pytest.mark.parametrize("name", ["kl", "ratio"])
def test_stop_ends_the_run_after_the_row_is_written(name):
    watch = MismatchWatch(max_kl=0.01, max_ratio=10.0, stop=True)
    values = {name: 20.0}
    assert watch.look(row(**values)) == {"mismatch/alarm": 1.0}
    with pytest.raises(MismatchAlarm, match=rf"mismatch/{name}.* is 20, above mismatch\.max_{name}"):
        watch.raise_alarm()


def test_a_mismatch_that_is_not_a_number_is_an_alarm():
    assert MismatchWatch(max_kl=0.01).look(row(float("nan")))["mismatch/alarm"] == 1.0


def test_an_iteration_without_a_step_is_not_looked_at():
    assert MismatchWatch(max_kl=0.01, canary=True, stop=True).look({"train/skipped": 1.0}, "abc") == {}


def test_what_the_numbers_say():
    from_the_start = where_to_look(row(0.1, **{"mismatch/position/0-64/kl": 0.09}))
    assert "temperature" in from_the_start
    assert "attention backend" not in from_the_start
    later = where_to_look(row(0.1, **{"mismatch/position/0-64/kl": 0.001}))
    assert "attention backend" in later
    assert "temperature" not in later
    assert "3 versions old" in where_to_look(row(0.1, **{"rollout/staleness_max": 3.0}))


def test_a_flat_canary():
    watch = MismatchWatch(canary=True, stop=True)
    watch.begin("same")
    for difference in (0.010, 0.012, 0.009, 0.011, 0.013, 0.010):
        found = watch.look(row(difference=difference), "same")
        watch.raise_alarm()
    assert found["mismatch/canary_growth"] == pytest.approx(0.034 / 0.031, rel=1e-2)  # last three to first three
    assert "6 steps at learning rate 0, weights unchanged" in watch.summary()


def test_rounding_alone_is_no_drift():
    watch = MismatchWatch(canary=True, stop=True)
    for difference in (1e-7, 1e-7, 1e-7, 5e-6, 5e-6, 5e-6):
        watch.look(row(difference=difference))
        watch.raise_alarm()


def test_a_canary_that_drifts():
    watch = MismatchWatch(canary=True, canary_growth=1.5, stop=True)
    for difference in (0.01, 0.01, 0.01, 0.015, 0.015):
        watch.look(row(difference=difference))
        watch.raise_alarm()
    assert watch.look(row(difference=0.018))["mismatch/alarm"] == 1.0
    with pytest.raises(MismatchAlarm, match=r"the canary drifts.*1\.60 times"):
        watch.raise_alarm()


def test_weights_that_change_at_learning_rate_0_always_end_the_run():
    watch = MismatchWatch(canary=True, stop=False)
    watch.begin("aaaa")
    watch.look(row(), "aaaa")
    watch.raise_alarm()
    watch.look(row(), "bbbb")
    with pytest.raises(MismatchAlarm, match="weights changed at learning rate 0"):
        watch.raise_alarm()


def test_a_resumed_canary_goes_on_where_it_was_left():
    watch = MismatchWatch(canary=True, stop=True)
    watch.begin("aaaa")
    for difference in (0.010, 0.012, 0.008, 0.011):
        watch.look(row(difference=difference), "aaaa")
    left = json.loads(json.dumps(watch.baseline()))
    resumed = MismatchWatch(canary=True, stop=True)
    resumed.begin("aaaa", left)
    found = resumed.look(row(difference=0.030), "aaaa")  # (0.012 + 0.008 + 0.030) / 0.030
    assert found["mismatch/canary_growth"] == pytest.approx(0.050 / 0.030, rel=1e-2)
    with pytest.raises(MismatchAlarm, match=r"the canary drifts.*1\.67 times"):
        resumed.raise_alarm()
    with pytest.raises(MismatchAlarm, match=r"hash aaaa, now bbbb.*left with others than it was resumed with"):
        MismatchWatch(canary=True).begin("bbbb", left)
    MismatchWatch(canary=True).begin(None, left)
    assert "5 steps at learning rate 0, weights unchanged; mean difference 0.01 nats at first" in resumed.summary()
    assert MismatchWatch().baseline() is None


def test_hashes_that_nobody_has_are_said_to_be_missing():
    watch = MismatchWatch(canary=True)
    watch.look(row(), None)
    watch.raise_alarm()
    assert "weights not compared" in watch.summary()
