"""Engines that fail, hang, vanish or are slow; proxies and workers that are killed or stopped: for real."""

from __future__ import annotations

import os
import signal

import pytest

from rl360.types import Stop
from tests.faults.rig import BUDGET_S, TIMER_S, Rig, wait_for
from tests.gateway.stub_engine import Fault

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "faults", "cause"),
    [
        ("status-500", [Fault("status", 500)], "engine_status_500"),
        ("timeout", [Fault("hang")], "engine_timeout"),
        ("cut-connection", [Fault("refused"), Fault("refused")], "engine_refused"),  # the pool itself asks twice
        ("bad-reply", [Fault("drop", field="meta_info.output_token_logprobs")], "engine_reply"),
    ],
)
def test_an_engine_that_fails_once_costs_one_try(rig: Rig, name: str, faults: list[Fault], cause: str) -> None:
    rig.engine.model.faults.extend(faults)
    (attempt,) = rig.run(rig.task(name, {"turns": 2}))
    assert rig.causes(attempt) == [cause]
    assert (attempt.reward, attempt.spec.try_number, len(attempt.turns)) == (1.0, 1, 2)


def test_an_engine_that_refuses_the_request_itself_is_not_asked_again(rig: Rig) -> None:
    rig.engine.model.faults.append(Fault("status", 400))
    (attempt,) = rig.run(rig.task("status-400", {"turns": 1}))
    assert (attempt.reward, attempt.cause, rig.causes(attempt)) == (None, "engine_status_400", [])


def test_an_agents_own_error_after_an_engines_failure_is_the_engines(rig: Rig) -> None:
    """The agent hides what failed behind an error of its own; the proxy knows better. The next try is clean."""
    rig.engine.model.faults.append(Fault("status", 500))
    rig.submit(rig.task("hidden-500", {"turns": 1, "raise": "OddError", "instead": True}))
    wait_for(lambda: any("hidden-500" in name for name in rig.requeued))
    (attempt,) = rig.next()
    assert rig.causes(attempt) == ["engine_status_500"]
    assert (attempt.reward, attempt.stop) == (1.0, Stop.AGENT_ERROR)


def test_an_engine_that_dies_and_comes_back(rig: Rig) -> None:
    task = rig.task("engine-dies", {"turns": 1})
    rig.engine.stop()
    try:
        attempts = rig.run(task, size=2)
    finally:
        rig.engine.start()
    assert {(a.reward, a.cause) for a in attempts} == {(None, "engine_refused")}
    assert [rig.causes(a) for a in attempts] == [["engine_refused"]] * 2
    assert [a.reward for a in rig.run(task, size=2)] == [1.0, 1.0]


def test_a_slow_engine_is_not_the_agents_timeout(patient_rig: Rig) -> None:
    """Three calls of 1 s are more than the budget, and none of it is the agent's."""
    patient_rig.engine.model.delay_s = 1.0
    (attempt,) = patient_rig.run(patient_rig.task("slow-engine", {"turns": 3}))
    assert attempt.timings.agent_s > BUDGET_S
    assert attempt.timings.engine_wait_s >= 3.0
    assert (attempt.reward, attempt.stop, patient_rig.causes(attempt)) == (1.0, Stop.FINISHED, [])


def test_a_pause_for_new_weights_is_not_the_agents_timeout(patient_rig: Rig) -> None:
    """Each of two turns is aborted four times without a token; the proxy asks again, 1.5 s of waiting a turn."""
    pause = [Fault("abort", keep=0)] * 4
    patient_rig.engine.model.faults.extend([*pause, Fault("none"), *pause])
    version = patient_rig.engine.model.version
    (attempt,) = patient_rig.run(patient_rig.task("weight-update", {"turns": 2}))
    assert (attempt.reward, attempt.stop, patient_rig.causes(attempt)) == (1.0, Stop.FINISHED, [])
    assert attempt.timings.agent_s > attempt.timings.engine_wait_s > 3.0 > BUDGET_S
    assert [s.version for s in attempt.segments[0].version_spans] == [version + 4, version + 8]


def test_a_timer_that_rings_because_of_the_engine_is_a_requeue(rig: Rig) -> None:
    """Seven calls of 1 s run into Harbor's own timer; what the agent itself used is far below its budget."""
    rig.engine.model.delay_s = 1.0
    rig.submit(rig.task("timer-rings", {"turns": 7}))
    wait_for(lambda: any(name.split("-", 2)[2] == "timer-rings-0" for name in rig.requeued))
    rig.engine.model.delay_s = 0.0
    (attempt,) = rig.next()
    assert rig.causes(attempt) == ["engine_wait"]
    assert (attempt.reward, len(attempt.turns)) == (1.0, 7)


LONG = "print the answer " * 12


def test_long_answers_are_the_policys_time_and_a_queue_is_not(rig: Rig) -> None:
    """Both attempts run into Harbor's timer inside a model call, with next to nothing of the agent's own.

    The first has sampled more than the budget's worth of tokens at the engine's usual pace, so it is graded. The second
    has waited for most of its time, so it is made again.
    """
    os.kill(rig.proxy_pid(), signal.SIGKILL)  # a new proxy, that knows no pace yet
    rig.run(rig.task("new-proxy", {"turns": 1}))
    model = rig.engine.model
    model.token_s = 0.5 / len(model.tokenizer.encode(LONG))
    model.script.extend([LONG] * 8)
    (warm,) = rig.run(rig.task("pace", {"turns": 8}))
    assert (warm.stop, rig.causes(warm)) == (Stop.FINISHED, [])

    model.script.extend([LONG] * 20)
    (long,) = rig.run(rig.task("long-answers", {"turns": 20}))
    assert long.trial is not None
    assert long.trial.exception_type == "AgentTimeoutError"
    assert long.timings.agent_s - long.timings.engine_wait_s < BUDGET_S / 2
    assert (long.reward, long.stop, rig.causes(long)) == (1.0, Stop.TIMEOUT, [])

    model.delay_s = 1.0
    rig.submit(rig.task("queue", {"turns": 20}))
    wait_for(lambda: any("-queue-" in name for name in rig.requeued))
    model.delay_s = model.token_s = 0.0
    (waited,) = rig.next()
    assert rig.causes(waited) == ["engine_wait"]
    assert waited.reward == 1.0


def test_an_agent_that_is_slow_itself_is_the_policys_timeout(rig: Rig) -> None:
    """Its own time is over the budget: graded as it stands, whether Harbor's longer timer rang or not."""
    (late,) = rig.run(rig.task("slow-agent", {"turns": 1, "run": [f"sleep {BUDGET_S + 0.5}"]}))
    assert (late.reward, late.stop, rig.causes(late)) == (1.0, Stop.TIMEOUT, [])
    (cut,) = rig.run(rig.task("hung-agent", {"turns": 1, "run": [f"sleep {TIMER_S + 60}"]}))
    assert (cut.reward, cut.stop, rig.causes(cut)) == (1.0, Stop.TIMEOUT, [])
    assert cut.trial is not None
    assert cut.trial.exception_type == "AgentTimeoutError"


def test_a_killed_proxy_is_replaced(rig: Rig) -> None:
    rig.engine.model.delay_s = 1.0
    before = rig.engine.model.num_requests
    rig.submit(rig.task("proxy-killed", {"turns": 1}), size=3)
    wait_for(lambda: rig.engine.model.num_requests >= before + 3)
    old = rig.proxy_pid()
    os.kill(old, signal.SIGKILL)
    rig.engine.model.delay_s = 0.0
    attempts = rig.next()
    assert {tuple(rig.causes(a)) for a in attempts} == {("proxy_session_lost",)}
    assert [a.reward for a in attempts] == [1.0] * 3
    assert rig.proxy_pid() != old


def test_a_proxy_that_nobody_reaches_is_replaced(rig: Rig) -> None:
    """Stopped, it takes connections and answers none: to agents and to the driver the same as a cut network."""
    rig.engine.model.delay_s = 0.5
    before = rig.engine.model.num_requests
    rig.submit(rig.task("proxy-stopped", {"turns": 1, "timeout_s": 1.5}))
    wait_for(lambda: rig.engine.model.num_requests > before)
    os.kill(rig.proxy_pid(), signal.SIGSTOP)
    rig.engine.model.delay_s = 0.0
    (attempt,) = rig.next()
    assert rig.causes(attempt) == ["proxy_timeout"]
    assert attempt.reward == 1.0


def test_a_killed_worker_is_replaced(patient_rig: Rig) -> None:
    patient_rig.submit(patient_rig.task("worker-killed", {"turns": 1, "first": ["sleep 66.25"]}))
    sandbox = wait_for(lambda: patient_rig.sandbox_with("sleep 66.25"))
    (worker,) = [pid for pid in patient_rig.worker_pids() if pid in {p.pid for p in sandbox.parents()}]
    os.kill(worker, signal.SIGKILL)
    (attempt,) = patient_rig.next()
    assert patient_rig.causes(attempt) == ["worker_died"]
    assert attempt.reward == 1.0
    assert worker not in patient_rig.worker_pids()
    assert not sandbox.is_running()


def test_a_worker_that_hangs_is_replaced(patient_rig: Rig) -> None:
    patient_rig.submit(patient_rig.task("worker-stopped", {"turns": 1, "first": ["sleep 67.25"]}))
    sandbox = wait_for(lambda: patient_rig.sandbox_with("sleep 67.25"))
    (worker,) = [pid for pid in patient_rig.worker_pids() if pid in {p.pid for p in sandbox.parents()}]
    os.kill(worker, signal.SIGSTOP)
    (attempt,) = patient_rig.next()
    assert patient_rig.causes(attempt) == ["trial_timeout"]
    assert attempt.reward == 1.0
