"""Each row of the failure table, by the class name that Harbor reports."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.rollout import failures
from rl360.rollout.failures import CAUSES, EXCEPTIONS, Action, agent_timer_s, classify, classify_cause
from rl360.types import Session, Stop, Timings, TrialResult, Turn

BUDGET_S = 10.0
TURN = Turn((), {"role": "assistant", "content": "x"}, "stop", 1, 1, 0.1, 0)


def trial(exception: str | None = None, rewards: dict | None = None, agent_s: float = 1.0, **metadata) -> TrialResult:
    return TrialResult("t", rewards, exception, "text", metadata, Timings(agent_s=agent_s), Path("x"))


def session(
    stop: Stop | None = None,
    cause: str | None = None,
    engine_wait_s: float = 0.0,
    turns: int = 1,
    sampling_s: float = 0.0,
    unanswered: bool = False,
) -> Session:
    return Session((), (TURN,) * turns, stop, cause, engine_wait_s, sampling_s=sampling_s, unanswered=unanswered)


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
        ("AgentSafetyRefusalError", {"reward": 0.0}, Action.TRAIN, Stop.GAVE_UP, None),
        ("SandboxDied", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "sandbox_died"),
        ("APIConnectionError", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "model_unreachable"),
        ("NonZeroAgentExitCodeError", {"reward": 0.0}, Action.REQUEUE, Stop.INFRASTRUCTURE, "agent_exit_code"),
        ("ModelNotFoundError", None, Action.MASK, Stop.INFRASTRUCTURE, "model_not_found"),
        ("OSError", None, Action.REQUEUE, Stop.INFRASTRUCTURE, "host_io"),
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


def test_sampling_the_policys_own_tokens_is_no_wait():
    """12 s with 11 of engine wait: 1 s of its own. With 9 of the 11 spent on its own tokens, 10 s; with 9.5, 10.5."""
    late = trial("AgentTimeoutError", {"reward": 0.0}, agent_s=12.0)
    within = classify(late, session(engine_wait_s=11.0, sampling_s=8.5), BUDGET_S)
    over = classify(late, session(engine_wait_s=11.0, sampling_s=9.5), BUDGET_S)
    assert (within.action, within.cause) == (Action.REQUEUE, "engine_wait")
    assert (over.action, over.stop) == (Action.TRAIN, Stop.TIMEOUT)


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


@pytest.mark.parametrize(
    "name", ["KeyError", "RuntimeError", "RecursionError", "NonZeroAgentExitCodeError", "AgentAuthenticationError"]
)
def test_what_an_agent_raised_in_a_sandbox_that_answers_is_the_policys(name):
    """Scored by the verifier, or zero; never masked. `agent_error` is what the watch over the agent found."""
    scored = classify(trial(name, {"reward": 1.0}, agent_error=name), session(), BUDGET_S)
    assert (scored.action, scored.stop, scored.cause) == (Action.TRAIN, Stop.AGENT_ERROR, None)
    unscored = classify(trial(name, None, agent_error=name), session(), BUDGET_S)
    assert (unscored.action, unscored.stop, unscored.cause) == (Action.SCORE_ZERO, Stop.AGENT_ERROR, name)
    no_tests = classify(trial("RewardFileNotFoundError", None, agent_error=name), session(), BUDGET_S)
    assert (no_tests.action, no_tests.cause) == (Action.SCORE_ZERO, name)
    at_cap = classify(trial(name, {"reward": 0.0}, agent_error=name), session(Stop.TURNS), BUDGET_S)
    assert (at_cap.action, at_cap.stop) == (Action.TRAIN, Stop.TURNS)


def test_what_an_agent_raised_is_not_the_policys_when_something_under_it_failed():
    broken_engine = session(Stop.INFRASTRUCTURE, "engine_timeout")
    end = trial("KeyError", {"reward": 0.0}, agent_error="KeyError")
    assert classify(end, broken_engine, BUDGET_S).cause == "engine_timeout"
    assert classify(end, None, BUDGET_S).cause == "proxy_session_lost"
    never_spoke = classify(end, session(turns=0), BUDGET_S)
    assert (never_spoke.action, never_spoke.cause) == (Action.REQUEUE, "unclassified_KeyError")
    # The sandbox died later, under the verifier.
    later = classify(trial("SandboxDied", None, agent_error="KeyError"), session(), BUDGET_S)
    assert (later.action, later.cause) == (Action.REQUEUE, "sandbox_died")
    # Its own client gave up on an engine that was slow: what it raised then is no word of the policy.
    gave_up = classify(
        trial("NonZeroAgentExitCodeError", {"reward": 0.0}, agent_error="NonZeroAgentExitCodeError"),
        session(unanswered=True),
        BUDGET_S,
    )
    assert (gave_up.action, gave_up.cause) == (Action.REQUEUE, "engine_wait")
    no_tests = trial("VerifierTimeoutError", agent_error="NonZeroAgentExitCodeError")
    assert classify(no_tests, session(unanswered=True), BUDGET_S).cause == "engine_wait"
    # Nobody looked whether the sandbox answered: the table as it stands.
    assert classify(trial("RecursionError"), session(), BUDGET_S).cause == "agent_recursion"


def test_a_policy_that_used_up_its_sandbox_scores_zero_even_without_a_verdict():
    verdict = classify(trial("RewardFileNotFoundError", exhausted="disk"), session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.SCORE_ZERO, "exhausted_disk")
    assert classify(trial(None, {"reward": 1.0}, exhausted="memory"), session(), BUDGET_S).action is Action.TRAIN


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("DownloadVerifierDirError", "failed: [Errno 28] No space left on device", "disk_full"),
        ("SandboxDied", "an artifact could not be taken from it", "sandbox_died"),
        ("APIConnectionError", "refused", "model_unreachable"),
        ("SandboxBuildFailedError", "a new one for the tests did not start", "sandbox_build"),
    ],
)
def test_a_limit_that_was_run_into_before_something_else_failed(name: str, text: str, cause: str) -> None:
    hosts = name in ("DownloadVerifierDirError", "SandboxDied")
    ended = replace(trial(name, None, exhausted="memory", hosts_failure=hosts), exception_message=text)
    verdict = classify(ended, session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.REQUEUE, cause)


def test_a_limit_that_was_run_into_by_an_agent_that_was_late_before_the_tests_had_no_sandbox() -> None:
    later = "SandboxBuildFailedError: a new one for the tests did not start"
    verdict = classify(trial("AgentTimeoutError", agent_s=12.0, exhausted="disk", later_failure=later), session(), 10.0)
    assert (verdict.action, verdict.cause) == (Action.REQUEUE, "sandbox_build")


@pytest.mark.parametrize("said", [["finished"], {"why": 1}, 3, "no such end"])
def test_what_somebody_elses_agent_calls_its_end_is_no_error_here(said: object) -> None:
    assert classify(trial(None, {"reward": 1.0}, stop=said), session(), BUDGET_S).stop is Stop.FINISHED


@pytest.mark.parametrize("name", ["RuntimeError", "MemoryLimitExceededError", "RewardFileNotFoundError", "ApiError"])
def test_a_limit_that_can_have_ended_it(name: str) -> None:
    verdict = classify(trial(name, None, exhausted="memory"), session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.SCORE_ZERO, "exhausted_memory")
    full = replace(
        trial("DownloadVerifierDirError", None, exhausted="disk"), exception_message="No space left on device"
    )
    assert classify(full, session(), BUDGET_S).action is Action.SCORE_ZERO


@pytest.mark.parametrize("rewards", [None, {"reward": 0.0}, {"reward": 1.0}])
@pytest.mark.parametrize("name", [None, "AgentTimeoutError", "RuntimeError"])
def test_no_verdict_counts_of_a_sandbox_that_was_interrupted(name, rewards):
    ended = trial(name, rewards, interrupted="signal 9 from outside", exhausted="disk")
    verdict = classify(ended, session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.REQUEUE, "sandbox_died")


@pytest.mark.parametrize("rewards", [None, {"reward": 0.0}])
def test_no_timer_counts_that_ran_out_while_its_worker_stood_still(rewards):
    for name, more in (
        ("AgentTimeoutError", {}),
        ("VerifierTimeoutError", {}),
        ("RuntimeError", {"agent_error": "RuntimeError", "later_failure": "VerifierTimeoutError: 60 s"}),
    ):
        verdict = classify(trial(name, rewards, stood_still=63.0, **more), session(), BUDGET_S)
        assert (verdict.action, verdict.cause) == (Action.REQUEUE, "worker_stood_still"), name
        assert classify(trial(name, rewards, **more), session(), BUDGET_S).cause != "worker_stood_still"
    in_time = classify(trial(None, {"reward": 1.0}, stood_still=63.0), session(), BUDGET_S)
    assert in_time.action is Action.TRAIN


@pytest.mark.parametrize(
    ("later", "action", "cause"),
    [
        ("DownloadVerifierDirError: failed: [Errno 28] No space left on device", Action.REQUEUE, "disk_full"),
        ("SandboxBuildFailedError: sandbox did not start", Action.REQUEUE, "sandbox_build"),
        ("OddError: ", Action.REQUEUE, "unclassified_OddError"),
        ("VerifierTimeoutError: 30 s", Action.SCORE_ZERO, "AgentTimeoutError"),  # what it left made its tests hang
    ],
)
def test_what_failed_under_the_tests_of_an_agent_that_was_late(later: str, action: Action, cause: str) -> None:
    """Harbor keeps the first failure of a trial. By that alone it would score zero, whatever it had done."""
    late = trial("AgentTimeoutError", agent_s=12.0, later_failure=later)
    verdict = classify(late, session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (action, cause)
    graded = trial("AgentTimeoutError", {"reward": 1.0}, agent_s=12.0, later_failure=later)
    assert classify(graded, session(), BUDGET_S).action is Action.TRAIN


def test_every_name_that_harbor_knows_has_its_own_row():
    """Harbor adds names; a new one must be decided on here rather than fall through to `unclassified`."""
    from harbor.models.trial.error_policy import ERROR_POLICIES

    assert sorted(set(ERROR_POLICIES) - set(EXCEPTIONS)) == []


def test_what_harbor_calls_the_agents_own_end_is_the_policys_here_and_nothing_else_is():
    from harbor.models.trial.error_policy import ERROR_POLICIES

    # Of the sandbox's failures, its memory limit is the policy's: it is what ran in there.
    ours = {"MemoryLimitExceededError", "SandboxLikelyOutOfMemoryError"}
    theirs = {name for name, policy in ERROR_POLICIES.items() if policy.reward_valid}
    assert {name for name, row in EXCEPTIONS.items() if row.policy is not None} == theirs | ours


def test_what_harbor_would_not_try_again_is_not_requeued_but_for_our_reasons():
    from harbor.models.trial.error_policy import ERROR_POLICIES

    # Our agents say BadRequestError of any 4xx, also of a session that a new proxy does not know; a cancelled trial
    # says nothing of its task.
    ours = {"BadRequestError", "CancelledError"}
    once = {name for name, policy in ERROR_POLICIES.items() if not policy.retry}
    assert {name for name in once if EXCEPTIONS[name].action is Action.REQUEUE} == ours


def causes_in_the_sources() -> set[str]:
    """First arguments of InfrastructureError and EngineError, and of the session's `_fail`, wherever a try passes."""
    found = set()
    package = Path(failures.__file__).parents[1]
    folders = ("agents", "engine", "gateway", "rollout", "sandboxes")
    files = {file for name in folders for file in (package / name).rglob("*.py")}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in ("InfrastructureError", "EngineError", "WorkerDied", "_fail"):
                    found.add(str(node.args[0].value))
    return found


def test_every_cause_that_our_code_raises_has_a_row():
    causes = causes_in_the_sources()
    assert {"engine_timeout", "worker_died", "proxy_session_lost", "proxy_error"} <= causes
    assert sorted(causes - set(CAUSES)) == []


def test_what_cannot_be_started_again_ends_the_run():
    for cause in ("worker_start", "proxy_start", "engine_start"):
        assert classify_cause(cause).action is Action.ABORT
    assert classify_cause("engine_status_503").action is Action.REQUEUE
    assert classify_cause("engine_status_413").action is Action.MASK
    assert classify_cause("never_heard_of").cause == "never_heard_of"


def test_a_bad_key_ends_the_run_only_where_it_never_worked():
    """Harbor reads some of these names from what an agent's program printed, and a policy can print anything."""
    first = classify(trial("AgentAuthenticationError"), session(turns=0), BUDGET_S)
    later = classify(trial("AgentAuthenticationError"), session(turns=3), BUDGET_S)
    assert (first.action, later.action) == (Action.ABORT, Action.MASK)
    refused = session(Stop.INFRASTRUCTURE, "engine_status_401", turns=0)
    assert classify(trial("InternalServerError"), refused, BUDGET_S).action is Action.ABORT


def test_a_policy_that_never_spoke_is_not_to_blame():
    quiet = session(turns=0)
    for end in (trial(None, {"reward": 0.0}), trial("AgentTimeoutError", {"reward": 0.0}, agent_s=11.0)):
        verdict = classify(end, quiet, BUDGET_S)
        assert (verdict.action, verdict.stop, verdict.cause) == (
            Action.REQUEUE, Stop.INFRASTRUCTURE, "no_model_call",
        )  # fmt: skip
    too_long = classify(trial(None, {"reward": 0.0}), session(Stop.LENGTH, turns=0), BUDGET_S)
    assert (too_long.action, too_long.stop) == (Action.TRAIN, Stop.LENGTH)


def test_own_time_over_the_budget_is_a_timeout_also_when_the_longer_timer_did_not_ring():
    """15 s, 4 of them waits: 11 s of its own against 10. With 6 s of waits it is in time."""
    end = trial(None, {"reward": 1.0}, agent_s=15.0)
    assert classify(end, session(engine_wait_s=4.0), BUDGET_S).stop is Stop.TIMEOUT
    assert classify(end, session(engine_wait_s=6.0), BUDGET_S).stop is Stop.FINISHED


def test_a_timeout_that_the_agent_raised_itself_is_told_apart():
    verdict = classify(trial("AgentTimeoutError", agent_s=2.0), session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.REQUEUE, "timeout")


def test_the_timer_is_what_the_trial_leaves():
    assert agent_timer_s(300.0, trial_timeout_s=700.0, start_timeout_s=60.0, verifier_timeout_s=60.0) == 580.0
    assert agent_timer_s(300.0, trial_timeout_s=320.0, start_timeout_s=60.0, verifier_timeout_s=60.0) == 300.0


def test_a_full_disk_of_the_host_is_told_apart_from_a_full_sandbox():
    text = "[Errno 28] No space left on device: 'result.json'"
    full = replace(trial("OSError"), exception_message=text)
    assert classify(full, session(), BUDGET_S).cause == "disk_full"
    inside = replace(trial("RuntimeError", exhausted="disk"), exception_message=text)
    assert classify(inside, session(), BUDGET_S).action is Action.SCORE_ZERO


def test_an_agent_may_say_that_it_was_failed():
    verdict = classify(trial(None, {"reward": 0.0}, stop="infrastructure"), session(), BUDGET_S)
    assert (verdict.action, verdict.cause) == (Action.REQUEUE, "agent_infrastructure")
