"""The interfaces between components. Components import these and rl360.types, never each other.

Each protocol has one contract test under tests/ that runs the same cases on every implementation. Constructors are not
part of a protocol: rl360.engine.build makes every component from its config group and passes collaborators in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl360.types import (
    Attempt,
    AttemptSpec,
    Batch,
    Group,
    GroupSpec,
    Keep,
    Purpose,
    Score,
    Session,
    SyncReport,
    Task,
    TrialResult,
    Update,
)

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Engine(Protocol):
    """One inference engine, driven over SGLang's HTTP protocol. All calls have a deadline inside.

    Raises `EngineError` with cause `engine_refused`, `engine_timeout`, `engine_status_<code>` or `engine_reply`.
    """

    url: str

    async def generate(
        self, input_ids: SequenceABC[int], sampling_params: Mapping[str, object], rid: str
    ) -> Mapping[str, Any]: ...
    async def load(self, path: Path, version: int) -> None: ...
    async def flush(self, wait_s: float = 0.0) -> None: ...  # wait_s: for requests to end
    async def abort(self, rid: str | None) -> None: ...  # None: every request
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def health(self) -> bool: ...
    async def info(self) -> Mapping[str, Any]: ...  # /model_info and /server_info merged; has weight_version
    async def close(self) -> None: ...


@runtime_checkable
class Gateway(Protocol):
    """Sessions: one per try. Owns token truth; see docs/guide/tokens.md."""

    async def start(self) -> None: ...
    async def verify(self) -> None: ...  # one request through the whole chain; names every field that is missing
    async def open(self, spec: AttemptSpec) -> str:
        """Return the OpenAI base URL of this try's own session, `http://host:port/s/<try_id>/v1`."""
        ...

    async def set_engines(self, urls: SequenceABC[str]) -> None: ...  # the serving set from now on; from any loop
    async def hold(self) -> None: ...  # no request reaches an engine until `release`; sessions wait; from any loop
    async def idle(self, timeout_s: float) -> int: ...  # wait for those on engines; how many are left; from any loop
    async def release(self) -> None: ...
    async def close_session(self, try_id: str) -> Session: ...
    async def discard(self, try_id: str) -> None: ...
    async def counts(self) -> Mapping[str, int]: ...  # what failed under sessions since the start; from any loop
    async def health(self) -> bool: ...
    async def close(self) -> None: ...


@runtime_checkable
class Rollout(Protocol):
    """Groups in, finished groups out. Bounded by admission, so slow attempts are waited for, not thrown away."""

    def start(self) -> None: ...
    def submit(self, spec: GroupSpec) -> None: ...
    def next(self, version: int, timeout_s: float, purpose: Purpose = Purpose.TRAIN) -> Group:
        """Block for the next finished group, in submission order when deterministic. Raises TimeoutError."""
        ...

    def drain(self) -> list[AttemptSpec]:
        """Stop starting work, cancel what is open, return the tries that had begun and did not finish."""
        ...

    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def waiting_for(self) -> str: ...  # one line for the watchdog
    def close(self) -> None: ...


@runtime_checkable
class Reward(Protocol):
    """One signal. `scope` is "attempt" or "group"; a group reward gets every attempt of the group at once.

    An attempt that ended before a verdict by its own doing is not asked about: it gets the attribute `without_verdict`
    where a reward has it, else 0.
    """

    name: str
    scope: str
    required: bool  # True: an attempt without this score is masked

    async def score(self, task: Task, attempts: SequenceABC[Attempt], deadline_s: float) -> SequenceABC[Score]: ...


@runtime_checkable
class Algorithm(Protocol):
    """Pure maths: no I/O, no logits, no device probe."""

    needs_reference: bool
    needs_sequence_ratios: (
        bool  # `loss` takes `sequence_correction`'s weights, from a pass over the batch before the step
    )
    updates_per_batch: int  # optimizer steps on one batch; 1: proximal equals current, no pass of its own

    def keep(self, group: Group) -> Keep: ...
    def prepare(self, groups: SequenceABC[Group]) -> Batch: ...
    def sequence_correction(self, log_ratio_sum_S: Tensor, token_count_S: Tensor) -> Tensor:
        """Weight of each sequence, from its tokens' summed proximal - behaviour. Asked by `needs_sequence_ratios`."""
        ...

    def loss(
        self,
        current_N: Tensor,
        proximal_N: Tensor,
        behaviour_N: Tensor,
        advantages_N: Tensor,
        weights_N: Tensor,
        reference_N: Tensor | None,
        correction_N: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Weighted sum over trained tokens, and metric sums (each already weighted, so that shards add up).

        Metrics whose name ends in `_max` take the maximum over shards instead.
        """
        ...


class PendingSave(Protocol):
    """A trainer's save that goes on in the background."""

    def wait(self) -> None: ...  # until every file is complete; from any thread; raises what went wrong


@runtime_checkable
class Trainer(Protocol):
    """Driver side of the trainer. `version` starts at 0 and grows by one with each step.

    One that can hash what it writes also has `publish_hashed(folder, dtype, ways) -> Expectation`
    (rl360.weight_sync.buckets): as `publish`, with hashes of its own tensors, never of the folder, for engines of that
    dtype (None: as written) and those tensor-parallel sizes, 1 among them. Without it, a folder that was spoilt as it
    was written goes unnoticed.

    One that can write while it trains also has `begin_save(folder) -> PendingSave | None` (None: complete already). One
    that shares GPUs with engines (rl360.weight_sync.colocated) has `offload` and `onload`, which give up and take back
    its memory there, and `trim`, which gives up what only its next step needs.
    """

    version: int

    def start(self) -> None: ...
    def step(self, batch: Batch) -> Update: ...
    def publish(self, folder: Path) -> Path:
        """Write the current weights as an HF checkpoint that transformers loads; atomic."""
        ...

    def save(self, folder: Path) -> None: ...  # weights, optimizer, random state; atomic
    def restore(self, folder: Path) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class WeightSync(Protocol):
    def hold(self) -> AbstractContextManager[None]: ...  # inside it no engine reads weights that the trainer changes
    def resident(self, last: bool = False) -> AbstractContextManager[None]:
        """Inside it the trainer has its memory, to save or to publish. last: engines are not needed any more."""
        ...

    def sync(self, trainer: Trainer, version: int) -> SyncReport:
        """Engines that failed are in `dropped`, out of the serving set. `confirmed` is empty where all died or hang and
        are being replaced; raises EngineError when nobody will be."""
        ...

    def check(self) -> None: ...  # raises EngineError when no engine is left and none will come back

    def on_change(self, tell: Callable[[tuple[str, ...]], None]) -> None: ...  # told each new serving set
    def hold_requests_at(self, gateway: Gateway) -> None: ...  # before engines are paused
    def fingerprint(self) -> str | None: ...  # of the weights that engines hold; None: they cannot be asked


@runtime_checkable
class Logger(Protocol):
    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None: ...
    def log(self, iteration: int, scalars: Mapping[str, float]) -> None: ...
    def log_text(self, iteration: int, name: str, text: str) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


class WorkerGroup(Protocol):
    """N workers that run one class; local processes here, Ray actors later. The caller does not know which."""

    size: int

    def start(self) -> None: ...
    async def call(self, rank: int, method: str, *args: Any, timeout_s: float | None = None) -> Any: ...
    def alive(self, rank: int) -> bool: ...
    def restart(self, rank: int) -> None: ...
    def close(self, grace_s: float = 5.0) -> None: ...


class Watchdog(Protocol):
    """Owns "no progress". `stage` names what runs now; `progress` says that it moved."""

    def stage(self, name: str) -> AbstractContextManager[None]: ...
    def progress(self) -> None: ...


class TrialRunner(Protocol):
    """What a trial worker runs: one Harbor trial, never raising for what went wrong inside it."""

    async def run(self, spec: AttemptSpec, base_url: str) -> TrialResult: ...
