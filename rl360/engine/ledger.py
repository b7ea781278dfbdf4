"""The attempt ledger: one row when a try starts, one when it is known what became of it, never more.

In: `AttemptSpec`s as they start, `Outcome`s as they are decided. Out: `ledger.jsonl`, and counts that are computed
from its rows alone. Left to others: what an outcome should be (loop, queue) and the attempts themselves (journal.py).

Rows are appended and never changed. A resume that goes back to an older checkpoint appends a `rollback` row: outcomes
of the iterations that are run again no longer count, and their tries are open again until they get another outcome. A
line that a crash cut off at the end of the file is dropped on opening.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rl360.engine.frames import naming
from rl360.errors import CheckpointError, RL360Error
from rl360.types import AttemptSpec, Outcome, OutcomeKind, Purpose

TRAIN_ONLY = frozenset({OutcomeKind.TRAINED, OutcomeKind.FILTERED, OutcomeKind.STALE})
ANOTHER_TRY_MAY_FOLLOW = frozenset({OutcomeKind.REQUEUED, OutcomeKind.UNUSED})


def is_run_again(purpose: Purpose, iteration: int, resumed_iteration: int, last_evaluated: int | None = None) -> bool:
    """Whether a resume that goes on with `resumed_iteration` makes this work again.

    last_evaluated: the iteration whose evaluation the checkpoint says is complete. The evaluation at k may come before
    the checkpoint at k, then it counts; or be cut, then it is made again.
    """
    if purpose is Purpose.EVAL and iteration == resumed_iteration:
        return last_evaluated != iteration
    return iteration >= resumed_iteration


@dataclass(frozen=True, slots=True)
class Started:
    """The ledger's view of one try."""

    try_id: str
    attempt_id: str
    group_id: str
    iteration: int
    purpose: Purpose
    try_number: int
    retry_of: str | None


class Ledger:
    """Append-only record of tries. Thread-safe: the queue's thread starts tries, the loop's decides about them.

    Raises RL360Error on a second start or a second outcome of one try, on an outcome of a try that never started, and
    on a training outcome of an evaluation try or the reverse.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._started: dict[str, Started] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._next_try: dict[str, int] = {}  # by attempt id
        self.earlier_s = 0.0  # from the first to the last row of each process before this one, all together
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115 closed by close()
        self._replay()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.close()

    # ---- writing

    def started(self, spec: AttemptSpec) -> None:
        """Write that a try begins. Reaches the kernel at once and the disk with the next outcome."""
        row = {
            "event": "started",
            "try_id": spec.try_id,
            "attempt_id": spec.attempt_id,
            "group_id": spec.group_id,
            "iteration": spec.iteration,
            "purpose": spec.purpose.value,
            "try_number": spec.try_number,
            "retry_of": spec.retry_of,
        }
        with self._lock:
            self._apply(row)
            self._append([row], durable=False)

    def record(self, outcomes: Outcome | Iterable[Outcome]) -> None:
        """Write what became of tries, all or none of them, and wait for the disk once."""
        batch = [outcomes] if isinstance(outcomes, Outcome) else list(outcomes)
        rows: list[dict[str, Any]] = [
            {
                "event": "outcome",
                "try_id": outcome.try_id,
                "attempt_id": outcome.attempt_id,
                "group_id": outcome.group_id,
                "iteration": outcome.iteration,
                "purpose": outcome.purpose.value,
                "kind": outcome.kind.value,
                "reason": outcome.reason,
            }
            for outcome in batch
        ]
        with self._lock:
            seen: set[str] = set()
            for outcome in batch:
                self._check(outcome)
                if outcome.try_id in seen:
                    raise RL360Error(f"ledger: two outcomes of {outcome.try_id} in one batch")
                seen.add(outcome.try_id)
            for row in rows:
                self._apply(row)
            self._append(rows, durable=True)

    def rollback(self, resumed_iteration: int, last_evaluated: int | None = None) -> list[Started]:
        """A resume goes on with this iteration. Returns every try that is open now: reuse its journalled attempt, or
        record it as unused."""
        row = {"event": "rollback", "iteration": resumed_iteration, "last_evaluated": last_evaluated}
        with self._lock:
            self._apply(row)
            self._append([row], durable=True)
        return self.open_tries()

    # ---- reading

    def open_tries(self) -> list[Started]:
        """Tries without an outcome, in the order in which they started."""
        with self._lock:
            return [s for try_id, s in self._started.items() if try_id not in self._outcomes]

    def ended_without_attempt(self) -> list[tuple[Started, Outcome]]:
        """Requeued and unused tries: their rows in the trajectories hold no attempt."""
        with self._lock:
            return [(self._started[t], o) for t, o in self._outcomes.items() if o.kind in ANOTHER_TRY_MAY_FOLLOW]

    def next_try_number(self, attempt_id: str) -> int:
        """0 for an attempt that never started."""
        with self._lock:
            return self._next_try.get(attempt_id, 0)

    def outcome_of(self, try_id: str) -> Outcome | None:
        with self._lock:
            return self._outcomes.get(try_id)

    def counts(self) -> dict[str, int]:
        """Tries that started and tries of each outcome kind, evaluation included: `attempts` of summary.json."""
        with self._lock:
            kinds = Counter(outcome.kind for outcome in self._outcomes.values())
            return {"started": len(self._started), **{kind.value: kinds[kind] for kind in OutcomeKind}}

    def masked_by_cause(self) -> dict[str, int]:
        with self._lock:
            masked = [o.reason or "unknown" for o in self._outcomes.values() if o.kind is OutcomeKind.MASKED]
        return dict(sorted(Counter(masked).items()))

    def audit(self, *, ended: bool = True) -> list[str]:
        """Everything that does not add up, one line each; empty when the ledger is sound.

        Args:
            ended: the run is over, so that an open try is a problem.
        """
        with self._lock:
            started, outcomes = dict(self._started), dict(self._outcomes)
        problems = []
        still_open = [try_id for try_id in started if try_id not in outcomes]
        if ended and still_open:
            problems.append(f"{len(still_open)} tries without an outcome: {', '.join(still_open[:5])}")
        by_attempt: dict[str, list[Started]] = defaultdict(list)
        by_group: dict[str, set[OutcomeKind]] = defaultdict(set)
        for try_id, one in started.items():
            by_attempt[one.attempt_id].append(one)
            if one.retry_of is not None and one.retry_of not in started:
                problems.append(f"{try_id} repeats {one.retry_of}, which never started")
            if try_id in outcomes:
                by_group[one.group_id].add(outcomes[try_id].kind)
        for attempt_id, tries in by_attempt.items():
            problems += _tries_problems(attempt_id, tries, outcomes)
        for group_id, kinds in by_group.items():
            whole = kinds & TRAIN_ONLY
            if len(whole) > 1:
                problems.append(f"group {group_id} is {' and '.join(sorted(whole))}; expected one of them")
        return problems

    # ---- inside

    def _append(self, rows: Iterable[Mapping[str, Any]], *, durable: bool) -> None:
        now = round(time.time(), 3)
        with naming(self.path):
            self._file.write(b"".join(json.dumps({**row, "at": now}).encode() + b"\n" for row in rows))
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())

    def _check(self, outcome: Outcome) -> None:
        one = self._started.get(outcome.try_id)
        if one is None:
            raise RL360Error(f"ledger: outcome {outcome.kind} of {outcome.try_id}, which never started")
        if (had := self._outcomes.get(outcome.try_id)) is not None:
            raise RL360Error(f"ledger: {outcome.try_id} is {outcome.kind} now and was {had.kind} before")
        training = outcome.kind in TRAIN_ONLY
        if training and one.purpose is Purpose.EVAL:
            raise RL360Error(f"ledger: {outcome.try_id} is an evaluation try and cannot be {outcome.kind}")
        if outcome.kind is OutcomeKind.EVALUATED and one.purpose is Purpose.TRAIN:
            raise RL360Error(f"ledger: {outcome.try_id} is a training try and cannot be evaluated")

    def _apply(self, row: Mapping[str, Any]) -> None:
        match row["event"]:
            case "started":
                if row["try_id"] in self._started:
                    raise RL360Error(f"ledger: {row['try_id']} started twice")
                purpose = Purpose(row["purpose"])
                ids = row["try_id"], row["attempt_id"], row["group_id"], row["iteration"]
                self._started[row["try_id"]] = Started(*ids, purpose, row["try_number"], row["retry_of"])
                known = self._next_try.get(row["attempt_id"], 0)
                self._next_try[row["attempt_id"]] = max(known, row["try_number"] + 1)
            case "outcome":
                ids = row["try_id"], row["attempt_id"], row["group_id"], row["iteration"]
                outcome = Outcome(*ids, Purpose(row["purpose"]), OutcomeKind(row["kind"]), row["reason"])
                self._check(outcome)
                self._outcomes[outcome.try_id] = outcome
            case "rollback":
                for try_id, outcome in list(self._outcomes.items()):
                    final = outcome.kind in ANOTHER_TRY_MAY_FOLLOW
                    if not final and is_run_again(
                        outcome.purpose, outcome.iteration, row["iteration"], row["last_evaluated"]
                    ):
                        del self._outcomes[try_id]

    def _replay(self) -> None:
        self._file.seek(0)
        good_end = 0
        spans: list[list[float]] = []  # a process begins with a rollback
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # cut off by a crash
            try:
                row = json.loads(line)
                self._apply(row)
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"{self.path}, line {number}: not a ledger row ({error!r})") from error
            good_end += len(line)
            if (at := row.get("at")) is not None:
                if row["event"] == "rollback" or not spans:
                    spans.append([at, at])
                spans[-1][1] = at
        self.earlier_s = sum(max(0.0, end - begin) for begin, end in spans)
        self._file.truncate(good_end)
        self._file.seek(0, os.SEEK_END)


def _tries_problems(attempt_id: str, tries: list[Started], outcomes: Mapping[str, Outcome]) -> list[str]:
    numbers = sorted(one.try_number for one in tries)
    if numbers != list(range(len(numbers))):
        return [f"attempt {attempt_id} has tries {numbers}; expected {list(range(len(numbers)))}"]
    problems = []
    for one in sorted(tries, key=lambda one: one.try_number)[:-1]:
        outcome = outcomes.get(one.try_id)
        if outcome is not None and outcome.kind not in ANOTHER_TRY_MAY_FOLLOW:
            problems.append(f"{one.try_id} is {outcome.kind}, and yet another try followed")
    return problems
