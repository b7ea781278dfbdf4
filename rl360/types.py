"""The records that flow through RL360, one way, with no behaviour of their own.

`Task -> AttemptSpec -> Attempt -> Group -> Batch -> Update`. Every record is frozen: a later stage builds a new one
instead of filling blanks in. Nothing here imports torch, Harbor or Hydra, so every process can import it.

Axes in array names: N packed tokens, S sequences, T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Purpose(StrEnum):
    """Why an attempt is made. Evaluation attempts never enter a training count."""

    TRAIN = "train"
    EVAL = "eval"


class Stop(StrEnum):
    """How an attempt ended. Everything but INFRASTRUCTURE is the policy's own doing and is scored."""

    FINISHED = "finished"  # the agent submitted or stopped by itself
    GAVE_UP = "gave_up"  # repeated tool failures, or the agent said so
    LENGTH = "length"  # the token cap of a turn or of the context
    TURNS = "turns"  # the turn cap
    TIMEOUT = "timeout"  # the agent's own time, engine waits taken out
    AGENT_ERROR = "agent_error"  # the agent raised
    INFRASTRUCTURE = "infrastructure"  # the sandbox, engine, proxy or verifier failed; never a zero


class OutcomeKind(StrEnum):
    """What became of one try of one attempt. Exactly one per try, in the ledger."""

    TRAINED = "trained"
    FILTERED = "filtered"  # reason: the rule that dropped its group
    MASKED = "masked"  # reason: the infrastructure cause
    REQUEUED = "requeued"  # reason: the cause; another try follows
    STALE = "stale"
    EVALUATED = "evaluated"
    UNUSED = "unused"  # the run ended before it was used


@dataclass(frozen=True, slots=True)
class Task:
    """One Harbor task: a folder with instruction.md, task.toml, environment/ and tests/test.sh."""

    task_id: str
    path: Path
    tags: tuple[str, ...]  # the first is the domain in metric names
    content_hash: str  # sha256 over the folder, to notice a changed data set

    @property
    def domain(self) -> str:
        return self.tags[0] if self.tags else "untagged"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine samples. The proxy applies it whatever the agent asked for."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all of the vocabulary
    max_new_tokens: int = 256  # of one turn
    max_context_tokens: int = 2048  # prompt and all turns of one session together
    max_turns: int = 1
    stop: tuple[str, ...] = ()  # strings that end a turn; they stay in the sampled ids
    stop_at_code_block: bool = False  # end the turn when a fenced code block closes


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One try of one attempt. A requeue makes a new spec: same attempt_id, try_number + 1."""

    attempt_id: str  # unique in the run but for tries: "t00003-001-<task>-2"
    group_id: str
    iteration: int  # the iteration (or evaluation) it is made for
    task: Task
    sampling: Sampling
    seed: int  # hash(run seed, iteration, task, attempt), the same for every try; the proxy mixes the turn in
    purpose: Purpose = Purpose.TRAIN
    try_number: int = 0
    retry_of: str | None = None  # the try_id that this one repeats

    @property
    def try_id(self) -> str:
        """Unique in the run, also over tries; names the session, the trial folder and the ledger row."""
        return f"{self.attempt_id}.t{self.try_number}"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """All attempts at one task that are compared with each other."""

    group_id: str
    iteration: int
    task: Task
    attempts: tuple[AttemptSpec, ...]
    purpose: Purpose = Purpose.TRAIN


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a segment were sampled under this weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A token sequence as the engine saw it. Each sampled token has mask 1 in exactly one segment."""

    token_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]  # True: sampled by the policy in this segment
    logprobs_T: NDArray[np.float32]  # behaviour logprob at the attempt's temperature; 0 where the mask is False
    version_spans: tuple[VersionSpan, ...]
    parent: int | None = None  # index of the segment whose history this one repeats as context
    fork_reason: str | None = None  # why a new segment began; None for the first

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        sampled = np.flatnonzero(self.loss_mask_T)
        return int(sampled[0]) if sampled.size else int(self.token_ids_T.size)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call as the proxy saw it, for the trajectory file and the viewer."""

    request_messages: tuple[Mapping[str, object], ...]  # the messages that were new in this request
    response_message: Mapping[str, object]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    engine_wait_s: float
    segment: int  # index into Attempt.segments


@dataclass(frozen=True, slots=True)
class Session:
    """What a gateway hands back when a session closes."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop: Stop | None  # LENGTH or TURNS when the proxy cut the session, INFRASTRUCTURE when the engine failed it
    cause: str | None
    engine_wait_s: float
    truncated_turns: int = 0
    retries_deduplicated: int = 0
    engine_resends: int = 0  # requests that failed under us and that the proxy sent again
    engine_moves: int = 0  # how often the session went on with another engine
    sampling_s: float = 0.0  # of engine_wait_s: what sampling these tokens takes; the rest were queues and pauses
    unanswered: bool = False  # the last call was still without an answer when its client was gone


@dataclass(frozen=True, slots=True)
class Score:
    """One reward signal for one attempt."""

    raw: float | None  # the signal itself; None: not available
    shaped: float  # what it adds to the attempt's reward
    valid: bool = True  # False masks the attempt (with a cause), never scores it zero
    success: bool | None = None  # None: this signal does not decide success
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall seconds of the phases of one try. engine_wait_s is inside agent_s, an agent's own setup inside sandbox_s."""

    queue_s: float = 0.0
    sandbox_s: float = 0.0
    agent_s: float = 0.0
    engine_wait_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial worker reports of one Harbor trial: plain data, picklable, no tokens."""

    try_id: str
    rewards: Mapping[str, float] | None  # the verifier's, by its own key; None: no verdict
    exception_type: str | None  # Harbor's class name
    exception_message: str | None
    agent_metadata: Mapping[str, object]  # AgentContext.metadata: has "stop", "format_ok", ...
    timings: Timings
    trial_dir: Path
    logs: Mapping[str, str] = field(default_factory=dict)  # name -> path of sandbox, agent and verifier logs


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One finished try with everything that training and the viewer need."""

    spec: AttemptSpec
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    scores: Mapping[str, Score]
    stop: Stop
    cause: str | None  # set when stop is INFRASTRUCTURE or a score is invalid
    timings: Timings
    trial: TrialResult | None
    truncated_turns: int = 0

    @property
    def valid(self) -> bool:
        """True when the attempt has a reward. An attempt without any score is not valid."""
        return self.stop is not Stop.INFRASTRUCTURE and bool(self.scores) and all(s.valid for s in self.scores.values())

    @property
    def reward(self) -> float | None:
        return sum(s.shaped for s in self.scores.values()) if self.valid else None

    @property
    def success(self) -> bool | None:
        """Whether the task was solved, apart from any penalty; None when the attempt has no verdict."""
        if not self.valid:
            return None
        verdicts = [s.success for s in self.scores.values() if s.success is not None]
        return all(verdicts) if verdicts else None

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(s.loss_mask_T.sum()) for s in self.segments)

    @property
    def oldest_version(self) -> int | None:
        versions = [span.version for s in self.segments for span in s.version_spans]
        return min(versions) if versions else None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All final tries of a group's attempts, masked ones included."""

    spec: GroupSpec
    attempts: tuple[Attempt, ...]

    @property
    def oldest_version(self) -> int | None:
        versions = [v for a in self.attempts if (v := a.oldest_version) is not None]
        return min(versions) if versions else None

    @property
    def newest_version(self) -> int | None:
        versions = [span.version for a in self.attempts for s in a.segments for span in s.version_spans]
        return max(versions) if versions else None


@dataclass(frozen=True, slots=True)
class Keep:
    """Whether a group is trained on, and by which rule it was dropped if not."""

    keep: bool
    rule: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One segment ready for the trainer, with its per-token weights."""

    token_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    behaviour_logprobs_T: NDArray[np.float32]
    advantages_T: NDArray[np.float32]
    weights_T: NDArray[np.float32]  # the reducer's weight of each token; over the global batch they sum to 1
    temperature: float
    group_id: str  # sequences of one group may share their prompt's compute
    attempt_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The global batch of one update: no padding, no device, no split yet."""

    sequences: tuple[Sequence, ...]
    num_trained_tokens: int  # over the whole batch: what the token mean divided by
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Update:
    """What one trainer step did. Metrics carry the scalar names of the docs."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the attempt ledger."""

    try_id: str
    attempt_id: str
    group_id: str
    iteration: int
    purpose: Purpose
    kind: OutcomeKind
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a weight sync did. The version advances only when `confirmed` is the whole serving set."""

    version: int
    confirmed: tuple[str, ...]
    dropped: tuple[str, ...]
    transfer_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation, pinned to one weight version."""

    version: int
    iteration: int
    num_attempts: int
    num_valid: int
    success_rate: float | None  # None when no attempt was valid
    reward_mean: float | None
    by_task: Mapping[str, float]
