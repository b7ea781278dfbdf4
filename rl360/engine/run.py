"""One run from its resolved config to its summary: what `rl360 run` and a launched driver both call.

In: a checked `RootConfig` whose run folder holds resolved.yaml. Out: the summary, which is also summary.json. The order
here is the run's: take the folder, build, restore if there is something to restore, loop, say how it ended.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl360.config.schemas import RootConfig
from rl360.engine import disk
from rl360.engine.build import Components, build, build_tasks, training_sampling
from rl360.engine.evaluation import Evaluator
from rl360.engine.loop import LoopSettings, TrainingLoop
from rl360.engine.mismatch import MismatchWatch
from rl360.engine.record import RunRecord
from rl360.engine.state import Checkpoint, CheckpointStore, RunState, only_writer, verify_checkpoint
from rl360.engine.summary import summarize_run, write_summary
from rl360.engine.watchdog import Watchdog
from rl360.errors import CheckpointError, Interrupted
from rl360.interrupts import use_a_signal_stack
from rl360.rollout.queue import RolloutEvents
from rl360.tasks.cursor import TaskCursor
from rl360.types import Sampling

log = logging.getLogger(__name__)


def run_experiment(config: RootConfig, resolved: DictConfig) -> dict[str, Any]:
    """Run, or continue, the experiment in `config.output_dir`. Returns the summary.

    Raises `Interrupted` after SIGTERM or Ctrl-C with the run left resumable, `DiskFull`, and whatever else ended a
    failed run; summary.json is written in every case.
    """
    assert config.output_dir is not None, "the command line names the run folder before it starts"
    run_dir = Path(config.output_dir)
    began = time.monotonic()
    use_a_signal_stack()
    with ExitStack() as stack:
        stack.enter_context(only_writer(run_dir))
        stack.enter_context(disk.reserve(run_dir))
        stack.enter_context(_log_file(run_dir))
        record = RunRecord(run_dir)
        stack.callback(_close_record, record, run_dir)
        earlier_wall_s = _earlier_wall_s(run_dir, record)
        (run_dir / "summary.json").unlink(missing_ok=True)  # of an earlier process: no longer true from here on

        def write_down(reason: str, error: str | None = None) -> dict[str, Any]:
            wall_s = earlier_wall_s + time.monotonic() - began
            summary = {
                **summarize_run(config, run_dir, record, reason, wall_s=wall_s, iterations=record.iterations_done),
                "error": error,
            }
            write_summary(run_dir, summary)
            return summary

        reason, error = "failed", None
        try:
            _train(config, resolved, run_dir, record, on_stall=lambda message: write_down("failed", message))
            reason = "finished"
        except (Interrupted, KeyboardInterrupt):
            reason = "interrupted"
            raise
        except BaseException as failure:
            full = disk.disk_full(failure, run_dir) if disk.is_full(failure, run_dir) else None
            error = f"{type(full or failure).__name__}: {full or failure}"
            log.exception("the run failed")
            if full is not None:
                raise full from failure
            raise
        finally:
            with disk.unless_full(run_dir):
                summary = write_down(reason, error)
                with Watchdog(
                    config.cluster.no_progress_s, lambda: "a service of its own", log_dir=run_dir / "logs",
                    kill_children=_kill_children,
                ) as watchdog:  # fmt: skip
                    record.finish(summary, watchdog)
        return summary


def _close_record(record: RunRecord, run_dir: Path) -> None:
    with disk.unless_full(run_dir):
        record.close()


def _train(
    config: RootConfig, resolved: DictConfig, run_dir: Path, record: RunRecord, on_stall: Callable[[str], object]
) -> None:
    training_tasks, evaluation_tasks = build_tasks(config)
    cursor = TaskCursor(training_tasks, config.seed)
    kept = config.checkpoint
    store = CheckpointStore(run_dir, kept.keep_last, kept.keep_best, kept.keep_every)
    checkpoint = store.latest()
    state = _starting_state(store, checkpoint, cursor)
    finished_before = record.resume_at(state.iteration, state.version, state.last_evaluated)
    if checkpoint is not None or finished_before:
        log.info("resuming at iteration %d with %d finished attempts", state.iteration, len(finished_before))
        where = "from its checkpoint" if checkpoint is not None else "no checkpoint was complete yet"
        print(f"resuming at iteration {state.iteration + 1}/{config.iterations}: {where}", flush=True)

    with ExitStack() as stack:
        stop = stack.enter_context(_stop_signals())
        rollout_line = _LateLine()
        watchdog = stack.enter_context(
            Watchdog(
                config.cluster.no_progress_s,
                rollout_line,
                log_dir=run_dir / "logs",
                kill_children=_kill_children,
                on_stall=on_stall,
            )
        )
        events = RolloutEvents(record.started, record.requeued, record.finished, watchdog.progress)
        with watchdog.stage("start"), stop.at_once("while the run started"):
            parts = stack.enter_context(
                build(config, run_dir, run_dir.name, events, checkpoint.trainer_folder if checkpoint else None)
            )
        rollout_line.describe = parts.rollout.waiting_for
        parts.rollout.restore({"finished": finished_before})
        _start_loggers(record, parts, run_dir, resolved)
        loop = TrainingLoop(
            settings=_settings(config),
            state=state,
            cursor=cursor,
            rollout=parts.rollout,
            algorithm=parts.algorithm,
            trainer=parts.trainer,
            sync=parts.sync,
            evaluator=_evaluator(config, evaluation_tasks),
            record=record,
            checkpoints=store,
            watchdog=watchdog,
            stop_requested=stop.asked.is_set,
            mismatch=_mismatch_watch(config),
            gateway_counts=parts.gateway_counts,
        )
        loop.run()
        if config.checkpoint.hf:
            with parts.sync.resident(last=True):
                parts.trainer.publish(run_dir / "checkpoints" / "hf")


def _earlier_wall_s(run_dir: Path, record: RunRecord) -> float:
    """Seconds that earlier processes of this run spent, by the summary that the last of them left. One that was killed
    left none: then by the ledger, whose rows end with the last thing that it did."""
    try:
        return float(json.loads((run_dir / "summary.json").read_text())["wall_s"])
    except (OSError, ValueError, KeyError):
        return record.earlier_s()


def _starting_state(store: CheckpointStore, checkpoint: Checkpoint | None, cursor: TaskCursor) -> RunState:
    """The saved state, or a new one. Refuses damaged checkpoints, and other tasks than the saved state counts in."""
    damaged = store.damaged()
    if checkpoint is None:
        if damaged:
            raise CheckpointError(
                f"no checkpoint of this run is whole: {'; '.join(damaged)}; expected at least one. Restore it or start "
                "a new run"
            )
        return RunState(task_fingerprint=cursor.fingerprint)
    for problem in damaged:
        log.warning("%s; going on from %s", problem, checkpoint.folder)
        print(f"warning: {problem}; going on from {checkpoint.folder.name}", file=sys.stderr)
    try:
        verify_checkpoint(checkpoint)
    except CheckpointError as error:
        if len(complete := store.complete()) < 2:
            raise
        way_out = f"or move {checkpoint.folder} away to go on from {complete[1].folder.name}"
        raise CheckpointError(f"{error}, {way_out}") from None
    state = checkpoint.state
    if state.task_fingerprint not in (None, cursor.fingerprint):
        raise CheckpointError(
            f"{checkpoint.folder}: saved with other training tasks; expected the same ids and contents"
        )
    cursor.position = state.task_position
    return state


def _settings(config: RootConfig) -> LoopSettings:
    from rl360.engine.engines import serving_gpus

    return LoopSettings(
        seed=config.seed,
        iterations=config.iterations,
        group_size=config.group_size,
        tasks_per_iteration=config.tasks_per_iteration,
        sampling=training_sampling(config),
        max_staleness=config.rollout.max_staleness,
        max_masked_share=config.rollout.max_masked_share,
        evaluate_every=config.evaluation.every,
        evaluate_at_start=config.evaluation.at_start,
        checkpoint_every=config.checkpoint.every,
        checkpoint_at_end=config.checkpoint.at_end,
        serving_gpus=serving_gpus(config),
    )


def _mismatch_watch(config: RootConfig) -> MismatchWatch:
    limits = config.mismatch
    canary = config.trainer.learning_rate == 0.0
    return MismatchWatch(limits.max_kl, limits.max_ratio, canary, limits.canary_growth, limits.stop)


def _evaluator(config: RootConfig, tasks: list[Any]) -> Evaluator | None:
    if not tasks:
        return None
    sampling: Sampling = replace(training_sampling(config), temperature=config.evaluation.temperature)
    return Evaluator(tasks=tasks, k=config.evaluation.k, sampling=sampling, seed=config.seed)


def _start_loggers(record: RunRecord, parts: Components, run_dir: Path, resolved: DictConfig) -> None:
    flat: Mapping[str, Any] = OmegaConf.to_container(resolved)  # type: ignore[assignment]
    record.loggers = list(parts.loggers.values())
    for logger in record.loggers:
        logger.start(run_dir, flat)


class _LateLine:
    """The watchdog starts before the rollout that it asks whom it waits for."""

    def __init__(self) -> None:
        self.describe: Any = lambda: "components to start"

    def __call__(self) -> str:
        return str(self.describe())


@dataclass(slots=True)
class _Stop:
    """What a signal has asked for."""

    asked: threading.Event = field(default_factory=threading.Event)
    interrupting: str | None = None  # when: nothing is worth finishing now
    raised: str | None = None  # the interruption that has been raised

    @contextmanager
    def at_once(self, when: str) -> Iterator[None]:
        """The first signal interrupts inside. Servers may need a quarter of an hour to start."""
        self.interrupting = when
        try:
            yield
        finally:
            self.interrupting = None


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """SIGTERM and Ctrl-C ask the loop to stop between two steps; a second one interrupts at once.

    An error that follows an interruption is taken for its consequence: native code may swallow a KeyboardInterrupt and
    fail of something else (safetensors: "could not determine the shape of object type").
    """
    stop = _Stop()

    def ask(signum: int, frame: FrameType | None) -> None:
        name, again = signal.Signals(signum).name, stop.asked.is_set()
        stop.asked.set()
        if again or stop.interrupting is not None:
            stop.raised = f"{name} {'for the second time' if again else stop.interrupting}"
            raise KeyboardInterrupt(stop.raised)
        print(f"{name}: finishing the write in hand; again to stop at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    except Exception as error:
        if stop.raised is None or isinstance(error, Interrupted):
            raise
        log.warning("after %s: %r", stop.raised, error)
        raise KeyboardInterrupt(stop.raised) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _log_file(run_dir: Path) -> Iterator[None]:
    """Everything that is logged goes to logs/driver.log; warnings go to the terminal too."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handler = disk.LogFile(folder / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def _kill_children() -> None:
    """For the watchdog: every process that descends from this one."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
