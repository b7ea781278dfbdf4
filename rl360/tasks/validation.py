"""Is a task fit to train on? Its layout is right, its oracle scores 1, doing nothing scores less, cheaters score 0.

In: tasks, trial workers whose agent is probe_agent.py, and training's own rule for what a trial scores. Out: one
`TaskReport` a task, kept in validation.json beside the tasks with a hash of everything that it depends on, so that an
unchanged task is not run again. Left to others: starting the workers and showing the reports (cli.py).

What failed under a trial (no sandbox, a full disk) is tried again, then leaves the task `unknown`: neither valid nor
invalid, and run again next time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl360.errors import InfrastructureError
from rl360.protocols import WorkerGroup
from rl360.tasks.cheaters import CHEATERS, PROBES, Kind, Probe, fingerprint
from rl360.tasks.needs import Needs
from rl360.types import AttemptSpec, Purpose, Sampling, Task, TrialResult

REPORT_NAME = "validation.json"
TRIES = 2  # of one probe, when what failed was not the task
_FORMAT = 1


class Verdict(StrEnum):
    VALID = "valid"
    INVALID = "invalid"
    UNKNOWN = "unknown"  # the machine failed, not the task


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe on one task. `reward` None: no verdict, and `cause` says why."""

    name: str
    reward: float | None
    cause: str | None = None
    infrastructure: bool = False  # True: the cause is not the task's
    said: str = ""  # the end of what was printed, or the error
    sandbox_s: float = 0.0
    agent_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskReport:
    task_id: str
    verdict: Verdict
    problems: tuple[str, ...]
    key: str  # of the task's content, the probes and the sandbox
    content_hash: str
    needs: Needs
    probes: tuple[ProbeResult, ...] = ()
    reused: bool = field(default=False, compare=False)  # True: from the report file, not run now

    def probe(self, name: str) -> ProbeResult | None:
        return next((p for p in self.probes if p.name == name), None)

    @property
    def highest_cheater(self) -> ProbeResult | None:
        """The cheater that got furthest; one without a verdict counts as furthest of all."""
        names = {probe.name for probe in CHEATERS}
        results = [p for p in self.probes if p.name in names]
        return max(results, key=lambda p: (p.reward is None, p.reward or 0.0), default=None)


def report_key(task: Task, sandbox: Mapping[str, Any]) -> str:
    """Hash of what a report depends on. sandbox: the settings that the trials run with."""
    text = json.dumps([_FORMAT, fingerprint(), task.content_hash, sandbox], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def judge(probes: Sequence[ProbeResult]) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict and every problem, from what the probes scored."""
    problems, unknown = [], []
    kinds = {probe.name: probe.kind for probe in PROBES}
    untouched = next((p.reward or 0.0 for p in probes if kinds[p.name] is Kind.NO_OP), 0.0)
    for result in probes:
        kind = kinds[result.name]
        if result.infrastructure:
            unknown.append(f"{result.name}: {result.cause}: {result.said}")
        elif result.reward is None:
            problems.append(f"{result.name}: no verdict ({result.cause}); expected the tests to always write a reward")
        elif kind is Kind.ORACLE and result.reward < 1.0:
            said = f": {result.said}" if result.said else ""
            problems.append(f"oracle: scores {result.reward:g}, expected 1{said}")
        elif kind is Kind.NO_OP and result.reward >= 1.0:
            problems.append(f"no-op: doing nothing scores {result.reward:g}, expected less than 1")
        elif kind is Kind.CHEATER and result.reward > min(untouched, 0.999):
            # A task that gives part of its reward for the untouched state gives a cheater no more than that.
            problems.append(f"{result.name}: this cheater scores {result.reward:g}, expected 0")
    if problems:
        return Verdict.INVALID, tuple(problems)
    return (Verdict.UNKNOWN, tuple(unknown)) if unknown else (Verdict.VALID, ())


class Validator:
    """Runs the probes of many tasks in trial workers, `jobs` trials at once.

    Args:
        workers: started trial workers whose agent is `rl360.tasks.probe_agent:ProbeAgent`.
        score_of: a trial -> (its reward or None, whether the machine failed and not the task, cause).
        url_of: (probe, solution folder) -> what stands in the place of the model's URL.
        on_probe: told after each probe.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        *,
        jobs: int,
        timeout_s: float,
        score_of: Callable[[TrialResult], tuple[float | None, bool, str | None]],
        url_of: Callable[[str, Path], str],
        on_probe: Callable[[Task, ProbeResult], None] = lambda task, result: None,
    ):
        self._workers, self._timeout_s = workers, timeout_s
        self._score_of, self._url_of = score_of, url_of
        self._on_probe = on_probe
        self._slots = asyncio.Semaphore(jobs)
        self._load = [0] * workers.size
        self._number = 0
        self._restarting = asyncio.Lock()

    async def validate(self, task: Task, needs: Needs, key: str) -> TaskReport:
        """The oracle first: when nothing can be said of it, the rest would cost time and say nothing."""
        if not (task.path / "solution" / "solve.sh").is_file():
            problem = (
                f"{task.path / 'solution' / 'solve.sh'}: missing; without it nobody knows that the task is solvable"
            )
            return TaskReport(task.task_id, Verdict.INVALID, (problem,), key, task.content_hash, needs)
        first = await self._probe(task, PROBES[0])
        results = [first]
        if not first.infrastructure:
            results += await asyncio.gather(*(self._probe(task, probe) for probe in PROBES[1:]))
        verdict, problems = judge(results)
        return TaskReport(task.task_id, verdict, problems, key, task.content_hash, needs, tuple(results))

    async def _probe(self, task: Task, probe: Probe) -> ProbeResult:
        for attempt in range(TRIES):
            async with self._slots:
                result = await self._try(task, probe, attempt)
            if not result.infrastructure:
                break
        self._on_probe(task, result)
        return result

    async def _try(self, task: Task, probe: Probe, attempt: int) -> ProbeResult:
        self._number += 1
        name = f"v{self._number:05d}-{_safe(task.task_id)[:60]}-{probe.name}"
        spec = AttemptSpec(name, task.task_id, 0, task, Sampling(), 0, Purpose.EVAL, try_number=attempt)
        rank = min(range(self._workers.size), key=self._load.__getitem__)
        self._load[rank] += 1
        try:
            url = self._url_of(probe.name, task.path / "solution")
            trial = await self._workers.call(rank, "run", spec, url, timeout_s=self._timeout_s)
        except (InfrastructureError, TimeoutError) as error:
            await self._revive(rank)
            return ProbeResult(probe.name, None, type(error).__name__, True, str(error))
        finally:
            self._load[rank] -= 1
        return self._result(probe, trial)

    def _result(self, probe: Probe, trial: TrialResult) -> ProbeResult:
        reward, infrastructure, cause = self._score_of(trial)
        said = trial.exception_message or str(trial.agent_metadata.get("output") or "")
        if probe.kind is Kind.ORACLE and (code := trial.agent_metadata.get("exit_code")):
            said = f"solve.sh ended with {code}: {said}"
        return ProbeResult(
            name=probe.name,
            reward=reward,
            cause=cause,
            infrastructure=infrastructure,
            said=said.strip()[-300:],
            sandbox_s=round(trial.timings.sandbox_s, 3),
            agent_s=round(trial.timings.agent_s, 3),
            verify_s=round(trial.timings.verify_s, 3),
            total_s=round(trial.timings.total_s, 3),
        )

    async def _revive(self, rank: int) -> None:
        async with self._restarting:
            if not self._workers.alive(rank):
                await asyncio.to_thread(self._workers.restart, rank)


class ReportFile:
    """validation.json of one folder of tasks: every task ever validated there, whichever manifest named it."""

    def __init__(self, path: Path):
        self.path = path
        self._tasks: dict[str, Any] = {}
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            self._tasks = dict(saved["tasks"]) if saved.get("format") == _FORMAT else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # absent, or written by something else: everything is run again

    def known(self, task: Task, key: str) -> TaskReport | None:
        """The report of an unchanged task. One that is unknown, or of another key, is none."""
        row = self._tasks.get(task.task_id)
        if not isinstance(row, dict) or row.get("key") != key or row.get("verdict") == Verdict.UNKNOWN:
            return None
        try:
            return _from_row(task.task_id, row)
        except (KeyError, TypeError, ValueError):
            return None

    def last_verdict(self, task: Task) -> str:
        """Of the last run on this content, whatever the sandbox was, for a list; `no` when there is none."""
        row = self._tasks.get(task.task_id)
        if not isinstance(row, dict) or row.get("content_hash") != task.content_hash:
            return "no"
        return str(row.get("verdict"))

    def add(self, reports: Iterable[TaskReport]) -> None:
        """Keep reports and write the file whole. Raises OSError when the folder cannot be written."""
        for report in reports:
            row = asdict(report)
            del row["task_id"], row["reused"]
            self._tasks[report.task_id] = row
        content = {"format": _FORMAT, "tasks": {name: self._tasks[name] for name in sorted(self._tasks)}}
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def _from_row(task_id: str, row: Mapping[str, Any]) -> TaskReport:
    report = TaskReport(
        task_id=task_id,
        verdict=Verdict(row["verdict"]),
        problems=tuple(row["problems"]),
        key=row["key"],
        content_hash=row["content_hash"],
        needs=Needs(**row["needs"]),
        probes=tuple(ProbeResult(**probe) for probe in row["probes"]),
    )
    return replace(report, reused=True)


def _safe(task_id: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in task_id)
