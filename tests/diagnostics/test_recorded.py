"""What a run wrote down of its loop, and engines whose rates are known."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rl360.diagnostics.recorded import EngineRates, RecordedAttempt, RecordedRun
from rl360.diagnostics.simulate import AttemptWork, simulate
from rl360.errors import RL360Error
from tests.diagnostics import test_simulate_cli
from tests.diagnostics.test_simulate_cli import make_run


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = RecordedRun.read(make_run(tmp_path / "run"))
    assert run.rates.request_tokens_per_s == pytest.approx(100.0)
    (attempt,) = {attempt for groups in run.iterations for group in groups for attempt in group}
    assert (attempt.sampling_s, attempt.versions) == (3.0, 1)
    work = attempt.work
    assert (work.tokens, work.turns, work.before_s, work.tools_s, work.after_s) == (300.0, 1, 1.25, 2.0, 0.5)
    setup = run.setup()
    assert (setup.iterations, setup.group_size, setup.train_s, setup.publish_s, setup.stall_s) == (
        4,
        2,
        1.0,
        0.25,
        0.25,
    )
    assert not setup.colocated


def test_servers_that_the_run_started_are_counted_and_their_stall_is_what_it_says(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        json.loads(line) | {"time/sync_stall_s": 0.1} for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for colocated in ("false", "true"):
        (folder / "resolved.yaml").write_text(
            "tasks_per_iteration: 1\ngroup_size: 2\nrollout: {engine: sglang, engine_urls: [], max_staleness: 0, "
            f"concurrency: 64, sglang: {{num_servers: 3, colocated: {colocated}}}}}\n"
        )
        setup = RecordedRun.read(folder).setup()
        assert (setup.engines, setup.publish_s, setup.stall_s) == (3, 0.25, 0.1)
        assert setup.colocated == (colocated == "true")


def test_a_fit_finds_each_of_its_terms_and_takes_no_more_than_it_needs():
    random = np.random.default_rng(0)
    calls, tokens = random.integers(1, 4, 200), random.integers(5, 300, 200)
    loads = random.uniform(1, 90, 200)

    def fitted(token_s, load_s, call_s):
        found = EngineRates.fitted(calls, tokens, loads, call_s * calls + tokens * (token_s + load_s * loads))
        return found.token_s, found.load_s, found.call_s

    for token_s in (0.0, 0.001):
        for load_s in (0.0, 0.0002):
            for call_s in (0.0, 0.05):
                if token_s or load_s:
                    known = (token_s, load_s, call_s)
                    assert fitted(*known) == pytest.approx(known, abs=1e-9)
    # A tenth of noise on every wait: the fit does not take up the two terms that are not there.
    noisy = 0.01 * tokens * random.uniform(0.9, 1.1, 200)
    assert EngineRates.fitted(calls, tokens, loads, noisy) == EngineRates(pytest.approx(0.01, rel=0.02), 0.0, 0.0)
    rates = EngineRates(0.0006, 0.0002, 0.05)
    assert (rates.request_tokens_per_s, rates.engine_tokens_per_s) == pytest.approx((1250.0, 5000.0))
    assert EngineRates(0.01).engine_tokens_per_s == math.inf
    with pytest.raises(ValueError, match="no token took any time"):
        EngineRates.fitted([1], [5], [1.0], [0.0])


def test_a_run_of_an_engine_under_load_is_understood_and_another_is_predicted(tmp_path):
    """The simulator makes a run whose engine is known; read back, its rates are found, and with them its own iteration
    and that of a loop that runs ahead. Attempts are short and long, so a rate of their median would be far off."""
    random = np.random.default_rng(1)
    known = EngineRates(0.001, 0.0002, 0.05)
    run = RecordedRun.read(make_run(tmp_path / "run"))
    run = replace(run, config=run.config | {"tasks_per_iteration": 4, "group_size": 16}, rates=known)
    setup = replace(run.setup(), iterations=8)
    works = {
        (i, slot, member): AttemptWork(float(random.integers(10, 400)), 1, before_s=float(random.uniform(0, 1)))
        for i in range(8)
        for slot in range(4)
        for member in range(16)
    }
    waits = defaultdict(float)

    def tell(place, seconds, load):
        waits[place] += seconds + known.call_s

    truth = simulate(setup, lambda *place: works[place], tell)

    def attempt(*place):
        return RecordedAttempt(works[place], waits[place], 1)

    recorded = tuple(
        tuple(tuple(attempt(i, slot, member) for member in range(16)) for slot in range(4)) for i in range(8)
    )
    recorded = replace(run, iterations=recorded, rates=EngineRates(1.0))
    found = replace(recorded, rates=recorded._fitted())
    assert found.rates.request_tokens_per_s == pytest.approx(known.request_tokens_per_s, rel=0.2)
    assert found.rates.engine_tokens_per_s == pytest.approx(known.engine_tokens_per_s, rel=0.05)
    assert found.simulated_step_s() == pytest.approx(truth.step_s, rel=0.05)
    other = replace(setup, max_staleness=1)
    rates = {"request_tokens_per_s": found.rates.request_tokens_per_s, "request_s": found.rates.call_s}
    rates["engine_tokens_per_s"] = found.rates.engine_tokens_per_s
    expected = simulate(other, lambda *place: works[place]).step_s
    assert simulate(replace(other, **rates), lambda *place: works[place]).step_s == pytest.approx(expected, rel=0.05)


def test_an_attempt_over_two_versions_has_waited_for_the_stall_too(tmp_path):
    """3 s of sampling and a stall of 0.25 s between them are 3.25 s of waiting: still 100 tokens a second."""
    run = RecordedRun.read(make_run(tmp_path / "run", max_staleness=1))
    over_two = replace(run.iterations[0][0][0], sampling_s=3.25, versions=2)
    run = replace(run, iterations=(((over_two, over_two),),) * 4, rates=EngineRates(1.0))
    assert run._fitted().request_tokens_per_s == pytest.approx(100.0)


def test_attempts_that_do_not_count_and_iterations_that_were_not_whole_are_left_out(tmp_path):
    run = RecordedRun.read(make_run(tmp_path / "run"))
    one = run.iterations[0][0][0]
    run = replace(run, iterations=(((one, one),), ((one,),), (), ((one, one),)), rates=EngineRates(1.0))
    assert run._fitted().request_tokens_per_s == pytest.approx(100.0)
    assert replace(run, rates=EngineRates(0.01)).simulated_step_s() == pytest.approx((8.0 + 1.25 + 8.0) / 3)


def test_a_run_without_a_finished_iteration_is_refused(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RL360Error, match="no finished iteration"):
        RecordedRun.read(folder)


def test_a_run_without_a_token_that_took_time_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(test_simulate_cli, "TIMES", replace(test_simulate_cli.TIMES, engine_wait_s=0.0))
    with pytest.raises(RL360Error, match="no finished iteration"):
        RecordedRun.read(make_run(tmp_path / "run"))
