"""The one failure contract: what a trial's end means for training.

In: a `TrialResult` (Harbor's exception by class name, the verifier's rewards), the proxy's `Session`, and the budget
of the agent. Out: a `Verdict`. The table below is the only place that decides it; the rollout acts on it, the ledger
records it.

What the policy did (truncation, turns, its own time-out, a wrong answer) is scored and trained on. What failed under
it is requeued a bounded number of times and then masked with its cause: never a zero. docs/guide/failures.md shows the
table to users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from rl360.types import Attempt, Session, Stop, TrialResult


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


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    policy: the policy's own end. It is trained on where the verifier gave a verdict all the same, else scored zero.
    at_cap: agents also say this when the proxy refuses a call at a cap of turns or tokens; then it is the policy's.
    agents: an agent's own program raises this too, or says it of what a program in the sandbox printed. Raised while
        the sandbox went on answering, it is the policy's (agent_watch.py); the row is for when that is not known.
    """

    action: Action
    cause: str
    policy: Stop | None = None
    at_cap: bool = False
    agents: bool = False


def _rows(
    action: Action, cause: str, names: Iterable[str], at_cap: bool = False, agents: bool = False
) -> dict[str, Row]:
    return dict.fromkeys(names, Row(action, cause, at_cap=at_cap, agents=agents))


def _policy(stop: Stop, names: Iterable[str]) -> dict[str, Row]:
    """The cause is the exception's own name: the ledger says what the policy ran into."""
    return {name: Row(Action.SCORE_ZERO, name, policy=stop) for name in names}


_REQUEUE, _MASK, _ABORT = Action.REQUEUE, Action.MASK, Action.ABORT

# By exception class name, as Harbor reports it. Every name of Harbor's own policy has a row here (tested).
EXCEPTIONS: Mapping[str, Row] = MappingProxyType(
    {
        # -- the policy's own doing
        **_policy(
            Stop.LENGTH,
            (
                "ContextWindowExceededError",
                "OutputTokenExceededError",
                "ContextLengthExceededError",
                "OutputLengthExceededError",
            ),
        ),
        **_policy(Stop.AGENT_ERROR, ("SandboxLikelyOutOfMemoryError", "MemoryLimitExceededError")),
        **_policy(Stop.GAVE_UP, ("AgentSafetyRefusalError", "ContentPolicyViolationError")),
        # `classify` takes the engine's share out of the agent's time first.
        **_policy(Stop.TIMEOUT, ("AgentTimeoutError",)),
        # -- sandbox
        "EnvironmentStartTimeoutError": Row(_REQUEUE, "sandbox_start_timeout"),
        "SandboxBuildFailedError": Row(_REQUEUE, "sandbox_build"),
        "AgentSetupTimeoutError": Row(_REQUEUE, "agent_setup_timeout"),
        "HealthcheckError": Row(_REQUEUE, "sandbox_health"),
        **_rows(_REQUEUE, "sandbox_access", ("SSHAccessError", "GKEExecStreamClosedError", "GKEPodNotFoundError")),
        "AddTestsDirError": Row(_REQUEUE, "sandbox_upload"),
        "DownloadVerifierDirError": Row(_REQUEUE, "sandbox_download"),
        "RuntimeRequestError": Row(_REQUEUE, "sandbox_request"),
        # What a Harbor environment raises when it is gone; our own says so before the verifier runs.
        "RuntimeError": Row(_REQUEUE, "sandbox_died", agents=True),
        "SandboxDied": Row(_REQUEUE, "sandbox_died"),
        **_rows(
            _REQUEUE,
            "sandbox_service",
            (
                "DaytonaError",
                "DaytonaRateLimitError",
                "DaytonaNotFoundError",
                "DaytonaTimeoutError",
                "DaytonaConnectionError",
            ),
        ),
        # -- the engine or the proxy, as agents and their libraries name it
        **_rows(
            _REQUEUE,
            "model_provider",
            (
                "RateLimitError",
                "InternalServerError",
                "ServiceUnavailableError",
                "Timeout",
                "APITimeoutError",
                "HTTPStatusError",
                "ReadTimeout",
                "EngineError",
            ),
        ),
        **_rows(  # Harbor reads these from what the agent's program printed; the proxy knows how its calls went
            _REQUEUE,
            "model_provider",
            (
                "ApiRateLimitError",
                "ApiInternalServerError",
                "ApiOverloadedError",
                "ApiResponseStalledError",
                "ApiUsageLimitError",
            ),
            agents=True,
        ),
        **_rows(
            _REQUEUE,
            "model_provider",
            ("ApiError", "UnknownApiError", "APIError", "APIStatusError", "BadRequestError"),
            at_cap=True,
            agents=True,
        ),
        **_rows(
            _REQUEUE,
            "model_unreachable",
            (
                "ApiConnectionClosedError",
                "ApiConnectionError",
                "NetworkConnectionError",
                "APIConnectionError",
                "ConnectError",
                "ConnectTimeout",
                "ReadError",
                "RemoteProtocolError",
                "TransportError",
                "RequestException",
                "ClientError",
                "ClientConnectorError",
                "ClientOSError",
                "ServerDisconnectedError",
                "ConnectionError",
                "ConnectionRefusedError",
                "ConnectionResetError",
                "BrokenPipeError",
            ),
        ),
        **_rows(
            _MASK,
            "model_request",
            ("UnprocessableEntityError", "UnsupportedParamsError", "UnsupportedModelParametersError"),
            at_cap=True,
            agents=True,
        ),
        **_rows(_MASK, "model_reply", ("APIResponseValidationError",)),
        **_rows(_MASK, "model_budget", ("BudgetExceededError",)),
        **_rows(_MASK, "model_not_found", ("ModelNotFoundError", "ApiProviderResourceNotFoundError"), agents=True),
        "NotFoundError": Row(_MASK, "model_not_found"),
        "AgentAuthenticationError": Row(_ABORT, "authentication", agents=True),
        **_rows(
            _ABORT,
            "authentication",
            (
                "AuthenticationError",
                "PermissionDeniedError",
                "ApiKeyRejectedError",
                "MissingModelCredentialError",
                "DaytonaAuthenticationError",
            ),
        ),
        # -- the agent's program
        "NonZeroAgentExitCodeError": Row(_REQUEUE, "agent_exit_code", at_cap=True, agents=True),
        "RecursionError": Row(_REQUEUE, "agent_recursion", at_cap=True, agents=True),
        # -- the verifier: the task is to blame, and another try would find the same
        "VerifierTimeoutError": Row(_MASK, "verifier_timeout"),
        **_rows(_MASK, "verifier_no_reward", ("RewardFileNotFoundError", "RewardFileEmptyError")),
        "VerifierOutputParseError": Row(_MASK, "verifier_garbage"),
        # -- the task's own settings
        **_rows(_MASK, "task_invalid", ("TOMLDecodeError", "UnsupportedTaskError")),
        "ValidationError": Row(_MASK, "task_invalid", agents=True),
        # -- Harbor
        **_rows(_MASK, "harbor_unsupported", ("ServiceOperationsUnsupportedError", "RegradeError")),
        **_rows(
            _ABORT, "missing_extra", ("MissingExtraError", "DspyImportError", "ModuleNotFoundError", "ImportError")
        ),
        "VercelScopeError": Row(_ABORT, "sandbox_account"),
        # -- this host
        **_rows(
            _REQUEUE,
            "host_io",
            ("OSError", "FileNotFoundError", "FileExistsError", "PermissionError", "NotADirectoryError"),
            agents=True,
        ),
        "MemoryError": Row(_REQUEUE, "host_memory"),
        "TimeoutError": Row(_REQUEUE, "timeout"),
        "CancelledError": Row(_REQUEUE, "cancelled"),
        "TrialTimeoutError": Row(_REQUEUE, "trial_timeout"),  # ours: Harbor has no limit of the whole trial
    }
)

# By cause: what our own parts report in `InfrastructureError.cause` and `Session.cause`.
CAUSES: Mapping[str, Row] = MappingProxyType(
    {
        name: Row(action, name)
        for action, names in (
            (
                _REQUEUE,
                (
                    "agent_infrastructure",  # the agent itself reports that something under it failed
                    "engine_refused",
                    "engine_timeout",
                    "engine_reply",
                    "engine_status_408",
                    "engine_status_429",
                    "engine_wait",  # Harbor's timer or the agent's own ran out while the engine had it wait
                    "no_model_call",
                    "proxy_error",
                    "proxy_session_lost",
                    "proxy_timeout",
                    "proxy_unreachable",
                    "smg_refused",  # SMG was away for longer than its restart takes
                    "timeout",
                    "trial_timeout",
                    "worker_died",
                    "worker_error",
                    "worker_stood_still",  # and a timer went on meanwhile
                ),
            ),
            # A request that the engine refuses as it stands: too long, or out of its memory. It would refuse it again.
            (_MASK, ("engine_status_400", "engine_status_413", "engine_status_422")),
            # What does not start a second time will not start for the next attempt either; nor are there other weights.
            (_ABORT, ("engine_start", "proxy_start", "smg_start", "worker_start", "weight_version")),
        )
        for name in names
    }
    | {f"engine_status_{code}": Row(_ABORT, "authentication") for code in (401, 403)}
)
AGENT_ERROR = (
    "agent_error"  # in a trial's metadata: the class of what its agent raised in a sandbox that went on answering
)
DISK_FULL = "No space left on device"  # strerror(ENOSPC): the host's disk, since a full sandbox is reported apart

_ELSEWHERE = ("model_", "sandbox_build", "sandbox_start_timeout")  # causes: the engine's side, and a new sandbox

# Ends of a verifier without a verdict. The task is to blame, unless the same tests judged another attempt of its group.
NO_VERDICT = frozenset({"verifier_timeout", "verifier_no_reward", "verifier_garbage"})
INTERRUPTED = "interrupted"  # in a trial's metadata: something outside ended its sandbox, or a process in it
STOOD_STILL = "stood_still"  # in a trial's metadata: seconds in which its worker did nothing, while timers went on
TIMERS = frozenset({"AgentTimeoutError", "VerifierTimeoutError"})  # of those that would count against the policy
HOSTS_FAILURE = "hosts_failure"  # in a trial's metadata: this machine was at its end, and not the sandbox
# In a trial's metadata, as "class name: message": what failed after the failure that the trial is known by.
LATER_FAILURE = "later_failure"
OFFLINE = "offline"  # in a trial's metadata: its sandboxes had no network that tests could have waited for


def unjudged_by_own_doing(attempts: Sequence[Attempt], judged_before: bool = False) -> list[int]:
    """Which attempts of a group end without a verdict because of what they left to be tested.

    The tests judged another attempt of the group, each in a new sandbox and without a network. So what made them hang
    or break here is what differs: the policy's work, such as a solution that never ends. `judged_before`: they judged
    an attempt at the same task by the same policy that is not among these.
    """
    if not judged_before and not any(
        attempt.valid and attempt.trial is not None and _has_verdict(attempt.trial) for attempt in attempts
    ):
        return []
    return [
        index
        for index, attempt in enumerate(attempts)
        if attempt.stop is Stop.INFRASTRUCTURE
        and attempt.cause in NO_VERDICT
        and attempt.trial is not None
        and attempt.trial.agent_metadata.get(OFFLINE) is True
    ]


def row_of(cause: str) -> Row:
    """The row of one of our own causes; an engine's other error statuses, and causes unknown here, are requeued."""
    return CAUSES.get(cause) or Row(Action.REQUEUE, cause)


def classify_cause(cause: str) -> Verdict:
    """What a failure of our own parts means, when there is no trial to look at."""
    row = row_of(cause)
    return Verdict(row.action, Stop.INFRASTRUCTURE, row.cause)


def classify(trial: TrialResult, session: Session | None, agent_timeout_s: float) -> Verdict:
    """Decide what the end of one try means.

    `agent_timeout_s` is the agent's own budget. Harbor's timer is wall clock, and is given more (`agent_timer_s`): the
    agent's seconds less those that it waited for the engine are what counts against the budget. Sampling the policy's
    own tokens is no wait: without it the attempts with the longest answers would be the ones that are left out.
    """
    if session is None:
        return classify_cause("proxy_session_lost")
    if session.stop is Stop.INFRASTRUCTURE:
        return _unless_it_worked(classify_cause(session.cause or "proxy_error"), session)
    verdict = _of_trial(trial, session, agent_timeout_s)
    if verdict.stop is not Stop.INFRASTRUCTURE and not session.turns and session.stop is None:
        # The policy never said a word: whatever came of it is not its doing. (A prompt over the cap has a stop.)
        return classify_cause("no_model_call")
    return _unless_it_worked(verdict, session)


def agent_timer_s(budget_s: float, trial_timeout_s: float, start_timeout_s: float, verifier_timeout_s: float) -> float:
    """Harbor's wall clock for the agent: all that the trial's deadline leaves it, at least the budget.

    The time between budget and timer is for engine waits: queues, and pauses for new weights.
    """
    return max(budget_s, trial_timeout_s - start_timeout_s - verifier_timeout_s)


def _of_trial(trial: TrialResult, session: Session, agent_timeout_s: float) -> Verdict:
    name = trial.exception_type
    has_verdict = _has_verdict(trial)
    if trial.agent_metadata.get(INTERRUPTED):
        # A test script that goes on after its program was killed writes a 0, and a command that was killed looks done.
        return classify_cause("sandbox_died")
    if trial.agent_metadata.get(STOOD_STILL) and not TIMERS.isdisjoint((name, _later(trial)[0])):
        return classify_cause("worker_stood_still")
    if not has_verdict and (resource := trial.agent_metadata.get("exhausted")) and not _failed_elsewhere(trial):
        # The policy used up its own sandbox (memory, disk, lifetime): the verifier had no ground left to stand on.
        return Verdict(Action.SCORE_ZERO, Stop.AGENT_ERROR, f"exhausted_{resource}")
    own_s = trial.timings.agent_s - (session.engine_wait_s - session.sampling_s)
    if name is None:
        if trial.agent_metadata.get("stop") == Stop.INFRASTRUCTURE.value:
            return classify_cause("agent_infrastructure")
        if has_verdict:
            late = own_s > agent_timeout_s and session.stop is None
            return Verdict(Action.TRAIN, Stop.TIMEOUT if late else _policy_stop(trial, session))
        return Verdict(Action.MASK, Stop.INFRASTRUCTURE, "verifier_garbage" if trial.rewards else "verifier_no_reward")
    row = _row(name)
    own = trial.agent_metadata.get(AGENT_ERROR)
    if own is not None and session.turns and (name == own or row.cause.startswith("verifier_")):
        if session.unanswered:
            return classify_cause("engine_wait")  # a client of its own gave up on the engine before the proxy did
        # The agent's program failed on what the policy said: its sandbox went on answering, and so did the engine.
        end = session.stop or Stop.AGENT_ERROR
        return Verdict(Action.TRAIN, end) if has_verdict else Verdict(Action.SCORE_ZERO, end, str(own))
    if name == "AgentTimeoutError" and own_s < agent_timeout_s:
        # Below the budget altogether: Harbor gives this name to any time-out that an agent raises.
        return classify_cause("engine_wait" if trial.timings.agent_s >= agent_timeout_s else "timeout")
    stop = row.policy
    if session.stop in (Stop.LENGTH, Stop.TURNS) and (row.at_cap or stop is Stop.LENGTH):
        stop = session.stop
    if stop is not None:
        if has_verdict:
            return Verdict(Action.TRAIN, stop)
        later, message = _later(trial)
        under_it = _infrastructure(_row(later), message)
        if later and under_it.action is Action.REQUEUE:
            return under_it  # its own end left it a verdict, which it lost to what failed under the tests
        return Verdict(Action.SCORE_ZERO, stop, name)
    return _infrastructure(row, trial.exception_message or "")


def _later(trial: TrialResult) -> tuple[str, str]:
    """(name, message) of what failed after the failure that the trial is known by."""
    name, _, message = str(trial.agent_metadata.get(LATER_FAILURE, "")).partition(": ")
    return name, message


def _failed_elsewhere(trial: TrialResult) -> bool:
    """Whether what failed cannot come of a used-up sandbox. One can run into a limit and go on well after it."""
    if trial.agent_metadata.get(HOSTS_FAILURE):
        return True
    rows = [EXCEPTIONS.get(name) for name in (trial.exception_type or "", _later(trial)[0])]
    return any(row is not None and not row.agents and row.cause.startswith(_ELSEWHERE) for row in rows)


def is_under_it(name: str) -> bool:
    """Whether a failure of this name is neither the policy's nor the task's: another try may not meet it."""
    row = _row(name)
    return row.policy is None and row.action is Action.REQUEUE


def _row(name: str) -> Row:
    return EXCEPTIONS.get(name, Row(Action.REQUEUE, f"unclassified_{name}"))


def _infrastructure(row: Row, message: str) -> Verdict:
    full = row.action is Action.REQUEUE and DISK_FULL in message
    return Verdict(row.action, Stop.INFRASTRUCTURE, "disk_full" if full else row.cause)


def _has_verdict(trial: TrialResult) -> bool:
    return bool(trial.rewards) and all(math.isfinite(value) for value in (trial.rewards or {}).values())


def _unless_it_worked(verdict: Verdict, session: Session) -> Verdict:
    """A setting that no attempt can work with has not let this one talk to the model. Agents derive some of these names
    from what programs print, so without this a policy could end the run by printing "invalid API key"."""
    if verdict.action is Action.ABORT and session.turns:
        return replace(verdict, action=Action.MASK)
    return verdict


def _policy_stop(trial: TrialResult, session: Session) -> Stop:
    """The proxy's caps come first; then what the agent said of itself; else it finished."""
    if session.stop is not None:
        return session.stop
    said = trial.agent_metadata.get("stop")
    return Stop(said) if isinstance(said, str) and said in {s.value for s in Stop} else Stop.FINISHED
