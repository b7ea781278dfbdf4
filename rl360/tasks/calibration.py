"""How often a model solves each task: k attempts a task through the rollout of training, kept in a journal.

In: tasks, a started rollout, and the settings that the attempts are made with. Out: calibration.json, one `TaskRate` a
task, and journal.jsonl, one line a finished attempt, from which the same command continues. Left to others: what an
attempt is (rollout), which tasks to take (selection.py), building and showing (wiring.py, cli.py).

Infrastructure failures are counted apart: they are no attempt of the policy, so they enter no rate, and a continued
calibration makes them again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl360.errors import TaskError
from rl360.protocols import Rollout
from rl360.rollout.failures import NO_VERDICT, unjudged_by_own_doing
from rl360.seeding import seed_from
from rl360.types import Attempt, AttemptSpec, GroupSpec, Purpose, Sampling, Score, Stop, Task

JOURNAL_NAME, RESULT_NAME = "journal.jsonl", "calibration.json"
Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
_FORMAT = 1
_HEAD_BYTES = 1 << 20
_TRIES_APART = 1000  # between the try numbers of two runs of the command: trial folders of the first may still be there


@dataclass(frozen=True, slots=True)
class TaskRate:
    """What is known of one task. rate, low, high: null before the first attempt with a verdict."""

    task_id: str
    tags: tuple[str, ...]
    content_hash: str
    attempts: int  # with a verdict
    successes: int
    rate: float | None
    low: float | None  # Wilson interval, 95 %
    high: float | None
    infrastructure_failures: int
    causes: Mapping[str, int]  # of the failures
    stops: Mapping[str, int]  # how the attempts with a verdict ended
    tokens_mean: float | None  # sampled tokens of an attempt
    turns_mean: float | None
    seconds_mean: float | None


def wilson(successes: int, attempts: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927): holds its coverage at few attempts and at rates near 0 and 1."""
    if not 0 <= successes <= attempts or attempts == 0:
        raise ValueError(f"{successes} successes of {attempts} attempts")
    rate, z2 = successes / attempts, z * z
    centre = (rate + z2 / (2 * attempts)) / (1 + z2 / attempts)
    half = z / (1 + z2 / attempts) * math.sqrt(rate * (1 - rate) / attempts + z2 / (4 * attempts * attempts))
    return max(0.0, centre - half), min(1.0, centre + half)


def model_fingerprint(folder: Path) -> str:
    """Names, sizes and first MiB of a checkpoint's files: two checkpoints of one run differ, a moved one does not."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()[:32]


class Journal:
    """journal.jsonl: the settings, then one line a finished attempt. A torn last line is dropped."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        """Raises TaskError when the folder holds a calibration made with other settings."""
        self.path = folder / JOURNAL_NAME
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        whole = [json.loads(line) for line in lines[:-1]]  # what follows the last line break was torn
        plain = json.loads(json.dumps(settings))
        if whole:
            if changed := [key for key in {**whole[0], **plain} if whole[0].get(key) != plain.get(key)]:
                raise TaskError(
                    f"{self.path}: made with other settings ({', '.join(sorted(changed))}); expected the same, "
                    "or another --folder, or --force to begin again"
                )
            self.rows = whole[1:]
        content = "".join(json.dumps(row) + "\n" for row in [plain, *self.rows])
        self.path.write_text(content, encoding="utf-8")
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def add(self, attempt: Attempt) -> None:
        """Keep one finished attempt. Called from the rollout's thread."""
        row = row_of(attempt)
        with self._lock:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.rows.append(row)

    def close(self) -> None:
        self._file.close()

    def of(self, task: Task) -> list[dict[str, Any]]:
        """The attempts at this content of the task."""
        with self._lock:
            return [r for r in self.rows if (r["task_id"], r["content_hash"]) == (task.task_id, task.content_hash)]


def row_of(attempt: Attempt) -> dict[str, Any]:
    task = attempt.spec.task
    return {
        "task_id": task.task_id,
        "content_hash": task.content_hash,
        "attempt": int(attempt.spec.attempt_id.rpartition("-")[2]),
        "success": attempt.success,  # null: no verdict
        "valid": attempt.valid,  # false: an infrastructure failure
        "reward": attempt.reward,
        "stop": attempt.stop.value,
        "cause": attempt.cause,
        "tokens": attempt.num_sampled_tokens,
        "turns": len(attempt.turns),
        "seconds": round(attempt.timings.total_s, 3),
    }


def open_groups(tasks: Sequence[Task], journal: Journal, k: int, sampling: Sampling, seed: int) -> list[GroupSpec]:
    """What is left to do: for each task the attempts of 0..k-1 that have no verdict yet."""
    groups = []
    for slot, task in enumerate(tasks):
        rows = journal.of(task)
        done = {row["attempt"] for row in rows if row["success"] is not None}
        group_id = f"c{slot:05d}-{_safe(task.task_id)}"
        specs = tuple(
            AttemptSpec(
                attempt_id=f"{group_id}-{index}",
                group_id=group_id,
                iteration=0,
                task=task,
                sampling=sampling,
                seed=seed_from(seed, "calibrate", task.task_id, index),
                purpose=Purpose.EVAL,
                try_number=_TRIES_APART * sum(row["attempt"] == index for row in rows),
            )
            for index in range(k)
            if index not in done
        )
        if specs:
            groups.append(GroupSpec(group_id, 0, task, specs, Purpose.EVAL))
    return groups


def run(rollout: Rollout, groups: Sequence[GroupSpec], no_progress_s: float, journal: Journal) -> None:
    """Make every open attempt. The journal is told by the rollout's events. Raises TimeoutError without progress.

    An attempt that finished without a verdict and got one with its group is told again: the later row counts. Its group
    are all attempts at the task in the journal, not only those that this command makes.
    """
    for group in groups:
        rollout.submit(group)
    for _ in groups:
        done = rollout.next(0, no_progress_s * max(1, len(groups)), Purpose.EVAL)
        rows = journal.of(done.spec.task)
        own = unjudged_by_own_doing(done.attempts, judged_before=any(_by_tests(row) for row in rows))
        for index, attempt in enumerate(done.attempts):
            if index in own:
                zero = {"verdict": Score(raw=None, shaped=0.0, success=False)}
                journal.add(replace(attempt, stop=Stop.AGENT_ERROR, scores=zero))
            elif attempt.valid and attempt.cause in NO_VERDICT:
                journal.add(attempt)


def _by_tests(row: Mapping[str, Any]) -> bool:
    """Whether the tests gave the verdict, and not how the attempt ended."""
    return row["success"] is not None and row["cause"] is None


def rate_of(task: Task, rows: Iterable[Mapping[str, Any]], k: int) -> TaskRate:
    """The rate over the first k attempts. rows: of this task, in the order they were made; the last of each counts."""
    last = {row["attempt"]: row for row in rows if row["attempt"] < k}
    judged = [row for row in last.values() if row["success"] is not None]
    failed = [row for row in last.values() if not row.get("valid", row["success"] is not None)]
    successes = sum(bool(row["success"]) for row in judged)
    low, high = wilson(successes, len(judged)) if judged else (None, None)
    return TaskRate(
        task_id=task.task_id,
        tags=task.tags,
        content_hash=task.content_hash,
        attempts=len(judged),
        successes=successes,
        rate=successes / len(judged) if judged else None,
        low=low,
        high=high,
        infrastructure_failures=len(failed),
        causes=_count(str(row["cause"]) for row in failed),
        stops=_count(row["stop"] for row in judged),
        tokens_mean=_mean([row["tokens"] for row in judged]),
        turns_mean=_mean([row["turns"] for row in judged]),
        seconds_mean=_mean([row["seconds"] for row in judged]),
    )


def write_result(folder: Path, rates: Sequence[TaskRate], *, tasks_path: str, k: int, settings: Any) -> Path:
    content = {
        "format": _FORMAT,
        "tasks_path": tasks_path,
        "k": k,
        "settings": settings,
        "tasks": [asdict(rate) for rate in rates],
    }
    path = folder / RESULT_NAME
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def _count(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items()))


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def _safe(task_id: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in task_id)
