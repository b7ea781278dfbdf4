"""The training loop: collect groups, keep what teaches, step, publish, record. Reads aloud, top to bottom.

In: components that rl360.engine.build made. Out: a run folder that grows by one iteration at a time, and the reason why
the loop ended. It knows protocols only: not where engines run, how tokens are kept or what the loss is.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl360.diagnostics.cpu import process_tree_cpu_s
from rl360.engine.evaluation import Evaluator
from rl360.engine.metrics import outcome_metrics, rollout_metrics
from rl360.engine.mismatch import MismatchWatch
from rl360.engine.record import RunRecord, outcome_of
from rl360.engine.state import CheckpointStore, RunState
from rl360.errors import EngineError, Interrupted, TooManyFailures
from rl360.protocols import Algorithm, Rollout, Trainer, Watchdog, WeightSync
from rl360.rollout.admission import admitted_before
from rl360.rollout.specs import group_spec
from rl360.tasks.cursor import TaskCursor
from rl360.types import Group, Outcome, OutcomeKind, Purpose, Sampling, Update

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often a wait looks whether the run was asked to stop


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The numbers of the root config that the loop itself needs."""

    seed: int
    iterations: int
    group_size: int
    tasks_per_iteration: int
    sampling: Sampling
    max_staleness: int  # versions that rollouts may run ahead; 0: on-policy
    max_masked_share: float  # of an iteration's attempts; more end the run
    evaluate_every: int  # 0: never
    evaluate_at_start: bool
    checkpoint_every: int  # 0: none between the first iteration and the last
    checkpoint_at_end: bool = True  # after the last iteration
    serving_gpus: int = 0  # that the trainer does not know of: those that only serve


@dataclass(slots=True)
class TrainingLoop:
    settings: LoopSettings
    state: RunState
    cursor: TaskCursor
    rollout: Rollout
    algorithm: Algorithm
    trainer: Trainer
    sync: WeightSync
    evaluator: Evaluator | None
    record: RunRecord
    checkpoints: CheckpointStore
    watchdog: Watchdog
    stop_requested: Callable[[], bool]
    mismatch: MismatchWatch = field(default_factory=MismatchWatch)
    gateway_counts: Callable[[], Mapping[str, float]] = dict  # scalars of what the gateway saw in the iteration
    submitted: int = 0  # iterations whose groups have been submitted
    early: dict[int, list[Group]] = field(default_factory=dict)  # finished groups by iteration, not trained on yet
    checkpointed_at: int | None = None

    def run(self) -> None:
        """Train until `iterations`. Raises Interrupted when asked to stop, after leaving a run that can be resumed."""
        self.submitted = self.state.iteration
        if self.mismatch.canary:
            self.mismatch.begin(self.sync.fingerprint(), self.state.canary)
        try:
            self.evaluate_if_due()
            while self.state.iteration < self.settings.iterations:
                self.iterate()
        except Interrupted:
            self.leave_resumable()
            raise
        if summary := self.mismatch.summary():
            log.warning("%s", summary)
        self.leave_resumable()

    def iterate(self) -> None:
        began, cpu_began = time.monotonic(), process_tree_cpu_s()
        iteration = self.state.iteration
        self.forget_what_is_saved()
        with self.watchdog.stage("rollout"):
            groups = self.collect(iteration)
        wait_s = time.monotonic() - began

        outcomes, kept = self.decide(groups)
        self.stop_if_too_many_failed(groups, outcomes)
        with self.watchdog.stage("train"):
            update = self.train(kept)
        with self.watchdog.stage("publish"):
            publish = self.publish(update)

        self.record.outcomes(groups, outcomes)
        metrics = {
            **rollout_metrics(groups, kept, self.state.version),
            **outcome_metrics(outcomes),
            "rollout/groups_ahead": float(sum(map(len, self.early.values()))),
            **update.metrics,
            **publish,
            **self.gateway_counts(),
            "time/wait_s": wait_s,
            "time/step_s": time.monotonic() - began,
            "time/cpu_s": process_tree_cpu_s() - cpu_began,
        }
        metrics.update(throughput(metrics, groups, self.settings.serving_gpus))
        metrics.update(self.mismatch.look(metrics, self.sync.fingerprint() if self.mismatch.canary else None))
        self.record.metrics(iteration, metrics, groups)
        self.state = replace(
            self.state,
            iteration=iteration + 1,
            version=update.version,
            task_position=(iteration + 1) * self.settings.tasks_per_iteration,
            canary=self.mismatch.baseline(),
        )
        self.watchdog.progress()
        self.mismatch.raise_alarm()
        self.evaluate_if_due()
        if self.due(self.settings.checkpoint_every):
            self.checkpoint()

    def collect(self, iteration: int) -> list[Group]:
        """Submit work as far ahead as staleness allows; wait for the groups of this iteration.

        Groups of a later one that finish first wait for their turn: slow tasks are not passed over by fast ones. What
        runs ahead goes on while the trainer steps and over the new weights; when the trainer is slow, nothing new is
        submitted, so finished work cannot pile up.
        """
        self.admit()
        while len(self.early.get(iteration, ())) < self.settings.tasks_per_iteration:
            self.remember(self.next_group(Purpose.TRAIN))
        self.take_what_is_ready()
        return sorted(self.early.pop(iteration), key=lambda group: group.spec.group_id)

    def remember(self, group: Group) -> None:
        self.early.setdefault(group.spec.iteration, []).append(group)
        self.watchdog.progress()

    def take_what_is_ready(self) -> None:
        """So that `rollout/groups_ahead` counts all of it. On-policy there is no work of a later iteration."""
        while self.submitted > self.state.iteration + 1:
            try:
                self.remember(self.rollout.next(self.state.version, 0.0, Purpose.TRAIN))
            except TimeoutError:
                return

    def admit(self) -> None:
        """Staleness is bounded here, by not starting work, so that a slow attempt is never thrown away."""
        horizon = admitted_before(self.state.iteration, self.settings.max_staleness, self.settings.iterations)
        while self.submitted < horizon:
            for slot, task in enumerate(self.cursor.take(self.settings.tasks_per_iteration)):
                spec = group_spec(
                    seed=self.settings.seed,
                    iteration=self.submitted,
                    slot=slot,
                    task=task,
                    group_size=self.settings.group_size,
                    sampling=self.settings.sampling,
                    purpose=Purpose.TRAIN,
                )
                self.rollout.submit(self.record.next_tries(spec))
            self.submitted += 1

    def next_group(self, purpose: Purpose) -> Group:
        while True:
            if self.stop_requested():
                raise Interrupted(f"asked to stop in iteration {self.state.iteration}")
            try:
                return self.rollout.next(self.state.version, POLL_S, purpose)
            except TimeoutError:
                self.sync.check()

    def decide(self, groups: Sequence[Group]) -> tuple[list[Outcome], list[Group]]:
        """One outcome for every attempt: masked, stale, filtered by a rule, or trained.

        Raises EngineError `weight_version` for tokens of a version that the trainer has not reached: whoever sampled
        them does not hold what it says, and their staleness is not known.
        """
        outcomes: list[Outcome] = []
        kept: list[Group] = []
        for group in groups:
            if (newest := group.newest_version) is not None and newest > self.state.version:
                raise EngineError(
                    "weight_version",
                    f"an engine says that it sampled tokens of group {group.spec.group_id} under version {newest}; the "
                    f"trainer's is {self.state.version}. Does somebody else give this engine weights?",
                )
            oldest = group.oldest_version
            stale = oldest is not None and self.state.version - oldest > self.settings.max_staleness
            decision = self.algorithm.keep(group)
            if decision.keep and not stale:
                kept.append(group)
            for attempt in group.attempts:
                if not attempt.valid:
                    outcome = outcome_of(attempt.spec, OutcomeKind.MASKED, attempt.cause or "no_score")
                elif stale:
                    outcome = outcome_of(attempt.spec, OutcomeKind.STALE, f"version {oldest} at {self.state.version}")
                elif not decision.keep:
                    outcome = outcome_of(attempt.spec, OutcomeKind.FILTERED, decision.rule)
                else:
                    outcome = outcome_of(attempt.spec, OutcomeKind.TRAINED, None)
                outcomes.append(outcome)
        return outcomes, kept

    def stop_if_too_many_failed(self, groups: Sequence[Group], outcomes: Sequence[Outcome]) -> None:
        """Raises TooManyFailures, with what failed written down: an iteration on a few survivors would mislead."""
        causes = Counter(str(o.reason) for o in outcomes if o.kind is OutcomeKind.MASKED)
        if causes.total() <= self.settings.max_masked_share * len(outcomes):
            return
        kept_none = [
            o if o.kind is OutcomeKind.MASKED else replace(o, kind=OutcomeKind.UNUSED, reason="too_many_failures")
            for o in outcomes
        ]
        self.record.outcomes(groups, kept_none)
        raise TooManyFailures(
            f"iteration {self.state.iteration}: {causes.total()} of {len(outcomes)} attempts failed under the policy, "
            f"more than rollout.max_masked_share {self.settings.max_masked_share} of them; causes: "
            + ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        )

    def train(self, kept: Sequence[Group]) -> Update:
        """One trainer step on the kept groups; without any, the version and the weights stay as they are."""
        batch = self.algorithm.prepare(kept) if kept else None
        if batch is None or not batch.sequences:
            log.info("iteration %d: nothing to train on (%d groups kept); no step", self.state.iteration, len(kept))
            return Update(self.state.version, {"train/skipped": 1.0, "time/train_s": 0.0})
        began = time.monotonic()
        with self.sync.hold():
            update = self.trainer.step(batch)
        return replace(update, metrics={"time/train_s": time.monotonic() - began, **update.metrics})

    def publish(self, update: Update) -> dict[str, float]:
        """Bring the new weights to the engines; the version counts when the whole serving set has confirmed it.

        Returns the seconds it took, and of them those of the synchronisation.

        An engine that did not is out of the set by then, and comes back with the weights of the day. Where none did,
        requests wait for the first that comes back; where none can, `sync` raises.
        """
        began = time.monotonic()
        found: dict[str, float] = {}
        if update.version != self.state.version:
            report = self.sync.sync(self.trainer, update.version)
            if report.dropped:
                log.warning("version %d: without %s, being replaced", update.version, ", ".join(report.dropped))
            found = {"time/sync_transfer_s": report.transfer_s, "time/sync_stall_s": report.stall_s}
        return {**found, "time/publish_s": time.monotonic() - began}

    def evaluate_if_due(self) -> None:
        """Every so many iterations, and once each: a resume makes up for one that was cut."""
        first = self.state.iteration == 0
        due = self.settings.evaluate_at_start if first else self.due(self.settings.evaluate_every)
        if self.evaluator is not None and due and self.state.last_evaluated != self.state.iteration:
            self.evaluate(self.evaluator)

    def evaluate(self, evaluator: Evaluator) -> None:
        """Success on tasks that are not trained on, at the weights of now."""
        with self.watchdog.stage("evaluate"):
            specs = [self.record.next_tries(spec) for spec in evaluator.specs(self.state.iteration)]
            for spec in specs:
                self.rollout.submit(spec)
            groups = []
            for _ in specs:
                groups.append(self.next_group(Purpose.EVAL))
                self.watchdog.progress()
        report = evaluator.summarize(self.state.version, self.state.iteration, groups)
        self.record.evaluation(report, sorted(groups, key=lambda group: group.spec.group_id))
        self.state = replace(self.state, last_evaluated=self.state.iteration)
        failed = sum(not attempt.valid for group in groups for attempt in group.attempts)
        if failed > self.settings.max_masked_share * report.num_attempts:
            raise TooManyFailures(
                f"evaluation at iteration {self.state.iteration}: {failed} of {report.num_attempts} attempts "
                f"failed under the policy, more than rollout.max_masked_share {self.settings.max_masked_share} of them"
            )
        best = self.state.best_success_rate
        if report.success_rate is not None and (best is None or report.success_rate > best):
            self.state = replace(self.state, best_success_rate=report.success_rate, best_iteration=self.state.iteration)
            if self.checkpoints.keep_best:
                self.checkpoint(best=True)

    def checkpoint(self, best: bool = False, last: bool = False) -> None:
        """Save where the run stands. A trainer that can writes its part in the background."""
        with self.watchdog.stage("checkpoint"), self.sync.resident(last):
            self.checkpoints.save(self.state, getattr(self.trainer, "begin_save", self.trainer.save), best=best)
        self.checkpointed_at = self.state.iteration
        self.forget_what_is_saved()

    def forget_what_is_saved(self) -> None:
        """The journal lets go of what a complete checkpoint covers."""
        for done in self.checkpoints.completed():
            self.record.forget_before(done.state.iteration, done.state.last_evaluated)

    def leave_resumable(self) -> None:
        """Close open tries in the ledger and save where the run stands, unless it is to keep nothing of that."""
        open_tries = self.rollout.drain()
        self.record.abandoned(open_tries, self.rollout.state()["finished"], finished=self.finished)
        wanted = self.settings.checkpoint_at_end or (self.settings.checkpoint_every > 0 and not self.finished)
        if wanted and self.checkpointed_at != self.state.iteration:
            self.checkpoint(last=True)
        with self.watchdog.stage("checkpoint"):
            self.checkpoints.wait()
        self.forget_what_is_saved()

    @property
    def finished(self) -> bool:
        return self.state.iteration >= self.settings.iterations

    def due(self, every: int) -> bool:
        return every > 0 and self.state.iteration % every == 0


def throughput(metrics: Mapping[str, float], groups: Sequence[Group], serving_gpus: int = 0) -> dict[str, float]:
    """Sampled tokens a second of the whole step; where the trainer counts its GPUs, all of the run's, and valid
    attempts an hour and GPU."""
    step_s = max(metrics["time/step_s"], 1e-9)
    attempts = [a for g in groups for a in g.attempts]
    found = {"perf/tokens_per_s": sum(a.num_sampled_tokens for a in attempts) / step_s}
    if training_gpus := metrics.get("perf/gpus", 0.0):
        found["perf/gpus"] = training_gpus + serving_gpus
        found["perf/trajectories_per_gpu_hour"] = sum(a.valid for a in attempts) * 3600.0 / step_s / found["perf/gpus"]
    return found
