"""A trial worker: runs Harbor trials, many at once, in a process of its own.

In: an `AttemptSpec` and the base URL of its session. Out: a `TrialResult`, also when everything went wrong. Left to
others: sessions and tokens (gateway), what an exception means for training (rollout), retries (rollout).

Harbor is imported in `start`, after the variables that keep it from telemetry and from fetching price lists are set.
The verifier runs in a sandbox of its own (verification.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.rollout.failures import AGENT_ERROR, HOSTS_FAILURE, INTERRUPTED, LATER_FAILURE, OFFLINE, STOOD_STILL
from rl360.rollout.standstill import Standstill
from rl360.rollout.steps import OUT_OF_TIME, all_judged, metadata_of
from rl360.rollout.trial_failures import Failure, deciding, in_order, remember_failures
from rl360.types import AttemptSpec, Timings, TrialResult

if TYPE_CHECKING:
    from harbor.models.trial.config import TrialConfig
    from harbor.models.trial.result import TimingInfo
    from harbor.models.trial.result import TrialResult as HarborResult
    from harbor.trial.trial import Trial

    from rl360.rollout.agent_watch import AgentWatch
    from rl360.rollout.separate import SeparateWatch

_HARBOR_ENV = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_LOCAL_SANDBOX = "rl360.sandboxes.local:LocalSandbox"
_OWN_SANDBOXES = "rl360.sandboxes."  # their constructors take the fields of SandboxConfig; others only their kwargs
_SANDBOX_FIELDS = (
    "network", "memory_mib", "cpus", "pids", "disk_mib", "lifetime_s", "start_timeout_s", "base", "unprivileged",
)  # fmt: skip
_MAX_MESSAGE_CHARS = 4000
_MAX_REWARD = 1e6  # of either sign; more is no score but a broken or a fooled test, and would swamp a group's mean
_MAX_REWARD_KEYS = 100


class TrialWorker:
    """One process's share of the trials.

    `agent` and `sandbox` are AgentConfig and SandboxConfig as mappings. `max_concurrent`: trials open at once here;
    `start_interval_s`: least time between two starts, so that a burst does not stall the event loop.
    """

    def __init__(
        self,
        *,
        agent: Mapping[str, Any],
        sandbox: Mapping[str, Any],
        cache_dir: str | Path,
        trials_dir: str | Path,
        trial_timeout_s: float,
        model_name: str,
        max_concurrent: int,
        start_interval_s: float,
        run_id: str,
        rank: int = 0,
        keep_trial_dirs: bool = False,
    ):
        self._agent, self._sandbox = dict(agent), dict(sandbox)
        self._cache_dir, self._trials_dir = Path(cache_dir), Path(trials_dir)
        self._trial_timeout_s = trial_timeout_s
        self._model_name = model_name
        self._start_interval_s = start_interval_s
        self._run_id, self._rank = f"{run_id}-w{rank}", rank
        self._keep_trial_dirs = keep_trial_dirs
        self._slots = asyncio.Semaphore(max_concurrent)
        self._next_start = 0.0
        self._standstill = Standstill()

    @property
    def _is_local(self) -> bool:
        return self._sandbox["import_path"] == _LOCAL_SANDBOX

    @property
    def _is_ours(self) -> bool:
        return str(self._sandbox["import_path"]).startswith(_OWN_SANDBOXES)

    async def start(self) -> None:
        """Import Harbor, make the base root file system, remove what killed runs left. Raises without ability."""
        os.environ.update(_HARBOR_ENV)
        self._standstill.begin()
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        from rl360.open_files import allow_many
        from rl360.rollout.harbor_trial import TaskCache
        from rl360.rollout.verification import changes_over

        self._tasks = TaskCache(swaps=changes_over(self._sandbox["import_path"]))
        _quieten_harbor()
        allow_many()
        self._trials_dir.mkdir(parents=True, exist_ok=True)
        if self._is_local:
            from rl360.sandboxes.local.host import open_host

            base, unprivileged = self._sandbox.get("base", "auto"), bool(self._sandbox.get("unprivileged", False))
            open_host(self._cache_dir, base, unprivileged, self._run_id)

    async def close(self) -> None:
        """End every sandbox of this process."""
        self._standstill.close()
        if self._is_local:
            from rl360.sandboxes.local.host import close_hosts

            await asyncio.to_thread(close_hosts)

    async def run(self, spec: AttemptSpec, base_url: str) -> TrialResult:
        """Run one trial. Raises nothing but CancelledError."""
        asked = time.monotonic()
        async with self._slots:
            await self._stagger()
            return await self._run(spec, base_url, time.monotonic() - asked)

    async def _stagger(self) -> None:
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._start_interval_s
        if start > now:
            await asyncio.sleep(start - now)

    async def _run(self, spec: AttemptSpec, base_url: str, queue_s: float) -> TrialResult:
        name = _trial_name(spec)
        trial_dir = self._trials_dir / name
        began = time.monotonic()
        trial: Trial | None = None
        watch: AgentWatch | None = None
        separate: SeparateWatch | None = None
        failure: Failure | None = None
        recorded: list[Failure] = []
        try:
            async with asyncio.timeout(self._trial_timeout_s):
                await asyncio.to_thread(_remove, trial_dir)  # an earlier try of that name left an answer there
                trial = await self._tasks.create(self._config(spec, base_url, name))
                from rl360.rollout.agent_watch import AgentWatch
                from rl360.rollout.verification import isolate

                recorded = remember_failures(trial)
                separate = isolate(trial)
                watch = AgentWatch(trial)
                await trial.run()
        except TimeoutError:
            if not recorded or recorded[-1].message != OUT_OF_TIME:
                failure = Failure("TrialTimeoutError", f"the trial took more than {self._trial_timeout_s} s")
        except asyncio.CancelledError:
            await asyncio.to_thread(shutil.rmtree, trial_dir, True)
            raise
        except Exception as error:  # Harbor raises anything from a task's own settings; all of it is the trial's result
            failure = Failure(type(error).__name__, str(error))
        finally:
            _forget_loggers(name)
        own = watch.error if watch is not None else None
        total_s = time.monotonic() - began
        result = _map(spec, trial, separate, failure, recorded, own, trial_dir, queue_s, total_s)
        if stood_s := self._standstill.seconds_since(began):
            result = replace(result, agent_metadata={**result.agent_metadata, STOOD_STILL: stood_s})
        if self._is_ours and not self._sandbox.get("network"):
            result = replace(result, agent_metadata={**result.agent_metadata, OFFLINE: True})
        failed = result.exception_type is not None or result.rewards is None
        if failed or self._keep_trial_dirs:
            return replace(result, logs=_logs(trial_dir))
        await asyncio.to_thread(shutil.rmtree, trial_dir, True)
        return result

    def _config(self, spec: AttemptSpec, base_url: str, name: str) -> TrialConfig:
        from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig

        sandbox_kwargs = dict(self._sandbox.get("kwargs") or {})
        if self._is_ours:
            fields = {key: self._sandbox[key] for key in _SANDBOX_FIELDS if key in self._sandbox}
            sandbox_kwargs = {**fields, "cache_dir": str(self._cache_dir), "run_id": self._run_id, **sandbox_kwargs}
        return TrialConfig(
            task=TaskConfig(path=spec.task.path),
            trial_name=name,
            trials_dir=self._trials_dir,
            agent=AgentConfig(
                import_path=self._agent["import_path"],
                model_name=self._model_name,
                skip_model_parsing=True,
                base_url=base_url,
                override_timeout_sec=self._agent["timeout_s"],
                kwargs=dict(self._agent.get("kwargs") or {}),
            ),
            environment=EnvironmentConfig(import_path=self._sandbox["import_path"], kwargs=sandbox_kwargs),
            verifier=VerifierConfig(max_timeout_sec=self._sandbox.get("verifier_timeout_s")),
        )


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _trial_name(spec: AttemptSpec) -> str:
    """The try's id as a folder name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in spec.try_id)


def _map(
    spec: AttemptSpec,
    trial: Trial | None,
    separate: SeparateWatch | None,
    failure: Failure | None,
    recorded: Sequence[Failure],
    agents_own: Exception | None,
    trial_dir: Path,
    queue_s: float,
    total_s: float,
) -> TrialResult:
    harbor: HarborResult | None = getattr(trial, "_result", None)
    metadata: dict[str, object] = {}
    rewards: dict[str, float] | None = None
    timings = Timings(queue_s=queue_s, total_s=queue_s + total_s)
    lost: Failure | None = None  # an artifact: what the tests said is not about the answer
    if separate is not None and separate.failed is not None:
        lost = Failure("SandboxDied", f"an artifact could not be taken from it: {separate.failed}")
    if harbor is not None:
        steps = harbor.step_results or []
        known, later = deciding(in_order(recorded, harbor, lost), bool(steps))
        failure = failure or known
        metadata.update(metadata_of(steps))
        if harbor.agent_result is not None:
            metadata.update(harbor.agent_result.metadata or {})
        for key in (AGENT_ERROR, HOSTS_FAILURE, INTERRUPTED, LATER_FAILURE, STOOD_STILL, "exhausted"):  # ours to say
            metadata.pop(key, None)
        if later is not None:
            metadata[LATER_FAILURE] = f"{later.name}: {later.message}"[:_MAX_MESSAGE_CHARS]
        if lost is not None or any(one.hosts for one in recorded):
            metadata[HOSTS_FAILURE] = True
        if agents_own is not None:
            own = Failure(type(agents_own).__name__, str(agents_own))
            if failure is None or failure.name != own.name:  # a later failure of the same name must not pass for it
                metadata[AGENT_ERROR] = own.name
            failure = failure or own
        judged = lost is None and all_judged(steps)
        if judged and harbor.verifier_result is not None and harbor.verifier_result.rewards:
            said = harbor.verifier_result.rewards
            # Compared before they become floats: JSON's whole numbers can be too large for one.
            if len(said) > _MAX_REWARD_KEYS or any(not abs(value) <= _MAX_REWARD for value in said.values()):
                failure = Failure("VerifierOutputParseError", f"{len(said)} rewards, or one beyond {_MAX_REWARD:g}")
            else:
                rewards = {key: float(value) for key, value in said.items()}
        timings = Timings(
            queue_s=queue_s,
            # An agent's own setup may install programs for minutes: none of that is the policy's time.
            sandbox_s=_seconds(harbor.environment_setup) + _seconds(harbor.agent_setup),
            agent_s=sum(map(_seconds, (harbor.agent_execution, *(step.agent_execution for step in steps)))),
            verify_s=sum(map(_seconds, (harbor.verifier, *(step.verifier for step in steps)))),
            total_s=queue_s + total_s,
        )
    environment = getattr(trial, "agent_environment", None)
    if exhausted := getattr(environment, "exhausted", ""):
        metadata["exhausted"] = exhausted
    for one in (environment, *(separate.environments if separate is not None else ())):
        if interrupted := getattr(one, "interrupted", ""):
            metadata[INTERRUPTED] = interrupted
    if (carried := getattr(environment, "carried", None)) is not None and carried.num_refused:
        metadata["artifacts_refused"] = list(carried.refused)
    return TrialResult(
        try_id=spec.try_id,
        rewards=rewards,
        exception_type=failure.name if failure else None,
        exception_message=failure.message[:_MAX_MESSAGE_CHARS] if failure else None,
        agent_metadata=metadata,
        timings=timings,
        trial_dir=trial_dir,
    )


def _seconds(timing: TimingInfo | None) -> float:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return 0.0
    return (timing.finished_at - timing.started_at).total_seconds()


def _logs(trial_dir: Path) -> dict[str, str]:
    """The log files that exist. They go with the trial's folder, which stays when the trial failed or is kept."""
    files = {
        "trial": "trial.log",
        "result": "result.json",
        "exception": "exception.txt",
        "verifier": "verifier/test-stdout.txt",
        "agent": "agent",
    }
    return {name: str(trial_dir / file) for name, file in files.items() if (trial_dir / file).exists()}


def _quieten_harbor() -> None:
    """Harbor logs at DEBUG: all of it belongs in each trial's own file, warnings in the worker's log too."""
    harbor = logging.getLogger("harbor.utils.logger")
    if harbor.propagate:
        harbor.propagate = False
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        harbor.addHandler(handler)


def _forget_loggers(trial_name: str) -> None:
    """Harbor makes several loggers named after each trial, and `logging` keeps every logger for ever."""
    known = logging.Logger.manager.loggerDict
    for name in [n for n in known if trial_name in n]:
        known.pop(name, None)
