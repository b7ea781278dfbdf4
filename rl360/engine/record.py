"""What a run writes down as it happens: ledger, journal, trajectories, metrics. One object, so that they agree.

In: events of the rollout's thread, decisions and scalars of the loop. Out: the files of the run folder. A resume asks
here which finished attempts are still good, and under which number an attempt is tried next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl360.engine.journal import Journal, Trajectories
from rl360.engine.ledger import Ledger, Started, is_run_again
from rl360.protocols import Logger, Watchdog
from rl360.types import (
    Attempt,
    AttemptSpec,
    EvalReport,
    Group,
    GroupSpec,
    Outcome,
    OutcomeKind,
    Purpose,
)

log = logging.getLogger(__name__)

SAMPLE_TEXTS = 2  # attempts an iteration whose text goes to the loggers; all of them are in the trajectories


class RunRecord:
    """Files of one run. `started`, `requeued`, `finished` come from the rollout's thread, the rest from the loop's."""

    def __init__(self, run_dir: Path, loggers: Sequence[Logger] = ()):
        self._ledger = Ledger(run_dir / "ledger.jsonl")
        self._journal = Journal(run_dir)
        self._trajectories = Trajectories(run_dir)
        self.loggers = list(loggers)
        self._requeued_lock = threading.Lock()
        self._requeued = 0  # training tries since the last row of metrics
        self.iterations_done: int | None = None  # None: not known before `resume_at`

    # ---- rollout events ----------------------------------------------------------------------------------------------

    def started(self, spec: AttemptSpec) -> None:
        self._ledger.started(spec)

    def requeued(self, spec: AttemptSpec, cause: str) -> None:
        outcome = outcome_of(spec, OutcomeKind.REQUEUED, cause)
        with self._requeued_lock:
            self._requeued += spec.purpose is Purpose.TRAIN
        self._ledger.record(outcome)
        self._trajectories.write([(spec, outcome)])

    def finished(self, attempt: Attempt) -> None:
        self._journal.append(attempt)

    # ---- resume ------------------------------------------------------------------------------------------------------

    def resume_at(self, iteration: int, version: int, last_evaluated: int | None = None) -> list[Attempt]:
        """Go back to where `iteration` begins, with the weights `version`. Returns the attempts not to be made again.

        Those sampled under later weights are made again: so are the weights, and they need not come out the same to the
        last bit. Tries that left no such attempt are requeued, and so are those that failed under the policy: what made
        them fail may be why the run ended, and a resume that met it again would end again.
        """
        open_tries = self._ledger.rollback(iteration, last_evaluated)
        self._trajectories.cut(iteration, last_evaluated)
        usable = {
            a.spec.try_id: a
            for a in self._journal.read()
            if a.valid
            and is_run_again(a.spec.purpose, a.spec.iteration, iteration, last_evaluated)
            and all(span.version <= version for segment in a.segments for span in segment.version_spans)
        }
        rows = [
            (one, outcome_of(one, OutcomeKind.REQUEUED, "run_ended")) for one in open_tries if one.try_id not in usable
        ]
        self._ledger.record([outcome for _, outcome in rows])
        # A crash between the two files left outcomes without a row.
        written = {line["try_id"] for i in self._trajectories.iterations() for line in self._trajectories.index(i)}
        self._trajectories.write([row for row in self._ledger.ended_without_attempt() if row[0].try_id not in written])
        self.iterations_done = iteration
        still_open = {one.try_id for one in open_tries}
        return [attempt for try_id, attempt in usable.items() if try_id in still_open]

    def next_tries(self, spec: GroupSpec) -> GroupSpec:
        """The group with each attempt numbered after the tries that the ledger knows; its seed stays."""
        attempts = []
        for attempt in spec.attempts:
            number = self._ledger.next_try_number(attempt.attempt_id)
            before = replace(attempt, try_number=number - 1).try_id if number else None
            attempts.append(replace(attempt, try_number=number, retry_of=before))
        return replace(spec, attempts=tuple(attempts))

    # ---- the loop's decisions ----------------------------------------------------------------------------------------

    def outcomes(self, groups: Sequence[Group], outcomes: Sequence[Outcome]) -> None:
        """Write what became of each attempt of these groups; `outcomes` are in the groups' order."""
        attempts = [attempt for group in groups for attempt in group.attempts]
        self._ledger.record(outcomes)
        self._trajectories.write(list(zip(attempts, outcomes, strict=True)))

    def metrics(self, iteration: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        with self._requeued_lock:
            metrics = {**metrics, "rollout/samples_requeued": float(self._requeued)}
            self._requeued = 0
        self.iterations_done = iteration + 1
        for logger in self.loggers:
            logger.log(iteration, metrics)
            for index, text in enumerate(sample_texts(groups)):
                logger.log_text(iteration, f"sample/{index}", text)

    def evaluation(self, report: EvalReport, groups: Sequence[Group]) -> None:
        outcomes = [
            outcome_of(a.spec, OutcomeKind.EVALUATED, None)
            if a.valid
            else outcome_of(a.spec, OutcomeKind.MASKED, a.cause or "no_score")
            for group in groups
            for a in group.attempts
        ]
        self.outcomes(groups, outcomes)
        found = {
            "eval/success_rate": report.success_rate,
            "eval/reward_mean": report.reward_mean,
            "eval/samples": float(report.num_valid),
            "eval/version": float(report.version),
        }
        found.update({f"eval/task/{task}/success_rate": rate for task, rate in report.by_task.items()})
        scalars = {name: value for name, value in found.items() if value is not None}
        for logger in self.loggers:
            logger.log(report.iteration, scalars)

    def abandoned(self, open_tries: Sequence[AttemptSpec], undecided: Sequence[Attempt], finished: bool) -> None:
        """The process ends. Of a finished run, what is left is unused; of another, open tries are made again on resume.

        Finished attempts that are not decided yet stay open in the ledger of an unfinished run: the journal has them.
        """
        kind, reason = (OutcomeKind.UNUSED, "run_finished") if finished else (OutcomeKind.REQUEUED, "interrupted")
        rows: list[tuple[Attempt | AttemptSpec, Outcome]] = [
            (spec, outcome_of(spec, kind, reason)) for spec in open_tries
        ]
        if finished:
            rows += [(attempt, outcome_of(attempt.spec, kind, reason)) for attempt in undecided]
        self._ledger.record([outcome for _, outcome in rows])
        self._trajectories.write(rows)

    def forget_before(self, iteration: int, last_evaluated: int | None) -> None:
        """A checkpoint at `iteration` is complete: the journal need not bring back what came before it."""
        self._journal.forget_before(iteration, last_evaluated)

    def finish(self, summary: Mapping[str, Any], watchdog: Watchdog) -> None:
        """Tell every logger that the run is over. What one of them raises is logged: the run has ended as it has. The
        watchdog ends the process where one does not come back (a service that is not reached): it holds nodes."""
        for logger in self.loggers:
            name = type(logger).__name__
            with watchdog.stage(f"end of logger {name}"):
                try:
                    logger.finish(summary)
                except Exception as error:
                    log.exception("logger %s did not finish: %s: %s", name, type(error).__name__, error)

    def counts(self) -> dict[str, int]:
        return self._ledger.counts()

    def earlier_s(self) -> float:
        """Wall seconds of the processes before this one, as far as the ledger tells."""
        return self._ledger.earlier_s

    def masked_by_cause(self) -> dict[str, int]:
        return self._ledger.masked_by_cause()

    def audit(self, ended: bool) -> list[str]:
        return self._ledger.audit(ended=ended)

    def close(self) -> None:
        self._ledger.close()


def outcome_of(spec: AttemptSpec | Started, kind: OutcomeKind, reason: str | None) -> Outcome:
    return Outcome(spec.try_id, spec.attempt_id, spec.group_id, spec.iteration, spec.purpose, kind, reason)


def sample_texts(groups: Sequence[Group]) -> list[str]:
    """The first attempts of the first group that has two different rewards, else of the first group."""
    differing = [g for g in groups if len({a.reward for a in g.attempts if a.valid}) > 1]
    chosen = (differing or list(groups))[:1]
    return [_text(attempt) for group in chosen for attempt in group.attempts[:SAMPLE_TEXTS]]


def _text(attempt: Attempt) -> str:
    head = f"**{attempt.spec.task.task_id}**  reward {attempt.reward}  stop {attempt.stop.value}"
    turns: list[Any] = [
        message for turn in attempt.turns for message in (*turn.request_messages, turn.response_message)
    ]
    return "\n\n".join([head, *(f"*{m.get('role')}*\n\n```\n{m.get('content')}\n```" for m in turns)])
