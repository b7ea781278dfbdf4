"""Each row of the failure table, by the class name that Harbor reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.rollout.failures import Action, classify
from rl360.types import Session, Stop, Timings, TrialResult

BUDGET_S = 10.0


def trial(exception: str | None = None, rewards: dict | None = None, agent_s: float = 1.0, **metadata) -> TrialResult:
    return TrialResult("t", rewards, exception, "text", metadata, Timings(agent_s=agent_s), Path("x"))


def session(stop: Stop | None = None, cause: str | None = None, engine_wait_s: float = 0.0) -> Session:
    return Session((), (), stop, cause, engine_wait_s)


@pytest.mark.parametrize(
    ("name", "rewards", "action", "stop", "cause"),
    [
        (None, {"reward": 0.0}, Action.TRAIN, Stop.FINISHED, None),  # a wrong answer is a score, not a failure
        (None, {"reward": 1.0}, Action.TRAIN, Stop.FINISHED, None),
        (None, None, Action.MASK, Stop.INFRASTRUCTURE, "verifier_no_reward"),
        (None, {}, Action.MASK, Stop.INFRASTRUCTURE, "verifier_no_reward"),
        (None, {"reward": float("nan")}, Action.MASK, Stop.INFRASTRUCTURE, "verifier_garbage"),
        (None, {"reward": 1.0, "x": float("inf")}, Action.MASK, Stop.INFRASTRUCTURE, "verifier_garbage"),
        ("ContextLengthExceededError", None, Action.SCORE_ZERO, Stop.LENGTH, "ContextLengthExceededError"),
        ("ContextLengthExceededError", {"reward": 1.0}, Action.TRAIN, Stop.LENGTH, None),
        ("InternalServerError", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "model_provider"),
        ("SandboxBuildFailedError", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "sandbox_build"),
        ("EnvironmentStartTimeoutError", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "sandbox_start_timeout"),
        ("RuntimeError", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "sandbox_died"),
        ("MemoryLimitExceededError", None, Action.SCORE_ZERO, Stop.AGENT_ERROR, "MemoryLimitExceededError"),
        ("VerifierTimeoutError", None, Action.MASK, Stop.INFRASTRUCTURE, "verifier_timeout"),
        ("RewardFileNotFoundError", None, Action.MASK, Stop.INFRASTRUCTURE, "verifier_no_reward"),
        ("VerifierOutputParseError", None, Action.MASK, Stop.INFRASTRUCTURE, "verifier_garbage"),
        ("AuthenticationError", None, Action.ABORT, Stop.INFRASTRUCTURE, "authentication"),
        ("NeverSeenError", {"reward": 1.0}, Action.REQUEUE, Stop.INFRASTRUCTURE, "unclassified_NeverSeenError"),
    ],
)
def test_every_end_has_one_meaning(name, rewards, action, stop, cause):
    verdict = classify(trial(name, rewards), session(), BUDGET_S)
    assert (verdict.action, verdict.stop, verdict.cause) == (action, stop, cause)


def test_a_timeout_is_the_policys_only_without_the_engines_share():
    """12 s of agent time: 3 s of engine wait leave 9 s, inside the budget of 10; 1 s leaves 11, outside."""
    late = trial("AgentTimeoutError", {"reward": 0.0}, agent_s=12.0)
    slow_engine = classify(late, session(engine_wait_s=3.0), BUDGET_S)
    slow_policy = classify(late, session(engine_wait_s=1.0), BUDGET_S)
    assert (slow_engine.action, slow_engine.cause) == (Action.REQUEUE, "engine_wait")
    assert (slow_policy.action, slow_policy.stop) == (Action.TRAIN, Stop.TIMEOUT)


def test_the_proxys_verdict_on_the_engine_comes_before_the_trials():
    """The agent may have written something and been scored; with a failed engine that score means nothing."""
    verdict = classify(trial(None, {"reward": 0.0}), session(Stop.INFRASTRUCTURE, "engine_timeout"), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.REQUEUE, "engine_timeout")


def test_a_lost_session_is_never_a_zero():
    assert classify(trial(None, {"reward": 0.0}), None, BUDGET_S).action is Action.REQUEUE


def test_caps_of_the_proxy_are_scored():
    for stop in (Stop.LENGTH, Stop.TURNS):
        verdict = classify(trial(None, {"reward": 1.0}, stop="finished"), session(stop), BUDGET_S)
        assert (verdict.action, verdict.stop) == (Action.TRAIN, stop)


def test_what_the_agent_says_of_itself_is_kept():
    assert classify(trial(None, {"reward": 0.0}, stop="gave_up"), session(), BUDGET_S).stop is Stop.GAVE_UP
    assert classify(trial(None, {"reward": 0.0}, stop="nonsense"), session(), BUDGET_S).stop is Stop.FINISHED


def test_a_refused_call_after_a_cap_is_the_policys_end_however_the_agent_names_it():
    capped = classify(trial("BadRequestError"), session(Stop.TURNS), BUDGET_S)
    assert (capped.action, capped.stop) == (Action.SCORE_ZERO, Stop.TURNS)
    assert classify(trial("BadRequestError"), session(), BUDGET_S).action is Action.REQUEUE


def test_a_policy_that_used_up_its_sandbox_scores_zero_even_without_a_verdict():
    verdict = classify(trial("RewardFileNotFoundError", exhausted="disk"), session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.SCORE_ZERO, "exhausted_disk")
    assert classify(trial(None, {"reward": 1.0}, exhausted="memory"), session(), BUDGET_S).action is Action.TRAIN
