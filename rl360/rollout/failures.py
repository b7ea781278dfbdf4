"""The one failure contract: what a trial's end means for training.

In: a `TrialResult` (Harbor's exception by class name, the verifier's rewards), the proxy's `Session`, and the budget
of the agent. Out: a `Verdict`. The table below is the only place that decides it; the rollout acts on it, the ledger
records it.

What the policy did (truncation, turns, its own time-out, a wrong answer) is scored and trained on. What failed under
it is requeued a bounded number of times and then masked with its cause: never a zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rl360.types import Session, Stop, TrialResult


class Action(StrEnum):
    TRAIN = "train"  # score with the rewards that the verifier gave
    SCORE_ZERO = "score_zero"  # the policy ended it before a verdict: its reward is 0
    REQUEUE = "requeue"  # try again while tries are left, then mask
    MASK = "mask"  # trying again would not help: mask at once
    ABORT = "abort"  # no attempt of this run can succeed: end the run


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Action
    stop: Stop
    cause: str | None = None  # set for all but TRAIN


_REQUEUE = {
    # sandbox
    "EnvironmentStartTimeoutError": "sandbox_start_timeout",
    "SandboxBuildFailedError": "sandbox_build",
    "AgentSetupTimeoutError": "agent_setup_timeout",
    "HealthcheckError": "sandbox_health",
    "SSHAccessError": "sandbox_access",
    "AddTestsDirError": "sandbox_upload",
    "DownloadVerifierDirError": "sandbox_download",
    "RuntimeRequestError": "sandbox_request",
    "RuntimeError": "sandbox_died",  # what a Harbor environment raises when it is gone
    # model provider: the engine or the proxy
    **dict.fromkeys(
        (
            "ApiError",
            "ApiRateLimitError",
            "ApiInternalServerError",
            "ApiOverloadedError",
            "ApiConnectionClosedError",
            "ApiResponseStalledError",
            "UnknownApiError",
            "NetworkConnectionError",
            "ApiConnectionError",
            "RateLimitError",
            "InternalServerError",
            "ServiceUnavailableError",
            "APIConnectionError",
            "APIError",
            "Timeout",
            "BadRequestError",
            "HTTPStatusError",
            "ConnectError",
            "ReadTimeout",
            "EngineError",
        ),
        "model_provider",
    ),
    # ours
    "WorkerDied": "worker_died",
    "TrialTimeoutError": "trial_timeout",
    "CancelledError": "cancelled",
    "OSError": "host_io",
}
_MASK = {
    "VerifierTimeoutError": "verifier_timeout",
    "RewardFileNotFoundError": "verifier_no_reward",
    "RewardFileEmptyError": "verifier_no_reward",
    "VerifierOutputParseError": "verifier_garbage",
}
_POLICY_BUDGET = {
    "ContextWindowExceededError",
    "OutputTokenExceededError",
    "ContextLengthExceededError",
    "OutputLengthExceededError",
}
_POLICY_MEMORY = {"SandboxLikelyOutOfMemoryError", "MemoryLimitExceededError"}
_ABORT = {
    "AgentAuthenticationError": "authentication",
    "AuthenticationError": "authentication",
    "PermissionDeniedError": "authentication",
    "MissingExtraError": "missing_extra",
}


def classify(trial: TrialResult, session: Session | None, agent_timeout_s: float) -> Verdict:
    """Decide what the end of one try means.

    `agent_timeout_s` is the agent's own budget: Harbor's timer is wall clock, so a time-out is the policy's only if the
    agent's seconds less the seconds that it waited for the engine exceed the budget.
    """
    if session is None:
        return Verdict(Action.REQUEUE, Stop.INFRASTRUCTURE, "proxy_session_lost")
    if session.stop is Stop.INFRASTRUCTURE:
        return Verdict(Action.REQUEUE, Stop.INFRASTRUCTURE, session.cause or "engine")
    name = trial.exception_type
    has_verdict = bool(trial.rewards) and all(math.isfinite(v) for v in (trial.rewards or {}).values())
    if not has_verdict and (resource := trial.agent_metadata.get("exhausted")):
        # The policy used up its own sandbox (memory, disk, lifetime): the verifier had no ground left to stand on.
        return Verdict(Action.SCORE_ZERO, Stop.AGENT_ERROR, f"exhausted_{resource}")
    if name is None:
        if has_verdict:
            return Verdict(Action.TRAIN, _policy_stop(trial, session))
        return Verdict(Action.MASK, Stop.INFRASTRUCTURE, "verifier_garbage" if trial.rewards else "verifier_no_reward")
    if name in _ABORT:
        return Verdict(Action.ABORT, Stop.INFRASTRUCTURE, _ABORT[name])
    if name == "AgentTimeoutError":
        own_s = trial.timings.agent_s - session.engine_wait_s
        if own_s < agent_timeout_s:
            return Verdict(Action.REQUEUE, Stop.INFRASTRUCTURE, "engine_wait")
        return Verdict(Action.TRAIN if has_verdict else Action.SCORE_ZERO, Stop.TIMEOUT, None if has_verdict else name)
    capped = session.stop in (Stop.LENGTH, Stop.TURNS)  # the proxy refused a call: agents report it as they like
    if name in _POLICY_BUDGET or (name == "BadRequestError" and capped):
        action, cause = (Action.TRAIN, None) if has_verdict else (Action.SCORE_ZERO, name)
        return Verdict(action, session.stop if capped and session.stop else Stop.LENGTH, cause)
    if name in _POLICY_MEMORY:
        return Verdict(Action.SCORE_ZERO, Stop.AGENT_ERROR, name)
    if name in _MASK:
        return Verdict(Action.MASK, Stop.INFRASTRUCTURE, _MASK[name])
    return Verdict(Action.REQUEUE, Stop.INFRASTRUCTURE, _REQUEUE.get(name, f"unclassified_{name}"))


def _policy_stop(trial: TrialResult, session: Session) -> Stop:
    """The proxy's caps come first; then what the agent said of itself; else it finished."""
    if session.stop is not None:
        return session.stop
    said = trial.agent_metadata.get("stop")
    return Stop(said) if said in {s.value for s in Stop} else Stop.FINISHED
