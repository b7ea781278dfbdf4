"""Groups in, finished groups out: opens sessions, runs trials in worker processes, scores, retries, journals.

In: `GroupSpec`s through `submit`. Out: `Group`s through `next`, each with one final try of every attempt. The queue
lives in one thread with its own event loop, so that the driver's thread is free to train. It leaves to others: what a
trial does (trial workers), the tokens (gateway), what an end means (rl360.rollout.failures) and what is trained on
(the algorithm).

Work is bounded by admission: `concurrency` attempts are open at once, everything else waits. Evaluation, for which the
loop waits, goes first, then the group that was submitted first: new work never delays what is nearly done. A try that
fails under the policy is requeued as a new try of the same attempt until `max_tries`, then kept as a masked attempt
with its cause. New weights do not stop anything: an attempt goes on over them, and its segments say which version each
token is from.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl360.errors import InfrastructureError, RL360Error
from rl360.protocols import Gateway, Reward, WorkerGroup
from rl360.rollout.admission import Slots
from rl360.rollout.failures import Action, Verdict, classify, classify_cause, unjudged_by_own_doing
from rl360.rollout.scoring import score_attempt, score_group
from rl360.types import (
    Attempt,
    AttemptSpec,
    Group,
    GroupSpec,
    Purpose,
    Session,
    Stop,
    Timings,
    TrialResult,
)

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0  # for open trials to clean up their sandboxes when the queue closes
ANSWER_S = 5.0  # more for the queue's thread to say so; a user's reward can block it
GATEWAY_GRACE_S = 90.0  # for the gateway, whose parts have limits of their own: SMG's is gateway.stop_timeout_s
DISCARD_TRIES = 3  # a proxy that stood still takes its time, and may have opened the session after all
REQUEUE_PAUSE_S = 0.25  # before the second try, doubled before each later one: what failed may be on its way back
LONGEST_PAUSE_S = 15.0  # of these; with rollout.max_tries=20 the last would otherwise be of 18 hours


@dataclass(frozen=True, slots=True)
class RolloutEvents:
    """What the queue tells the run as it happens. Called from the queue's thread: quick, and thread-safe."""

    started: Callable[[AttemptSpec], None]
    requeued: Callable[[AttemptSpec, str], None]  # the try that failed, and its cause
    finished: Callable[[Attempt], None]
    progress: Callable[[], None]


@dataclass(slots=True)
class _OpenGroup:
    spec: GroupSpec
    order: int
    finished: dict[str, Attempt] = field(default_factory=dict)  # attempt_id -> its final try

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.spec.attempts)


class QueueRollout:
    """protocols.Rollout over trial workers.

    Errors: `next` raises TimeoutError when nothing finished in time, and whatever ended the queue's thread (an abort
    cause of the failure table raises `InfrastructureError`).
    """

    def __init__(
        self,
        *,
        gateway: Gateway,
        workers: WorkerGroup,
        rewards: Mapping[str, Reward],
        events: RolloutEvents,
        concurrency: int,
        max_tries: int,
        agent_timeout_s: float,
        client_timeout_s: float,
        deterministic: bool = False,
    ):
        self._gateway = gateway
        self._workers = workers
        self._rewards = dict(rewards)
        self._events = events
        self._concurrency = concurrency
        self._max_tries = max_tries
        self._agent_timeout_s = agent_timeout_s
        self._client_timeout_s = client_timeout_s
        self._deterministic = deterministic

        self._lock = threading.Condition()
        self._groups: dict[str, _OpenGroup] = {}
        self._ready: dict[Purpose, deque[_OpenGroup]] = {purpose: deque() for purpose in Purpose}
        self._replayed: dict[str, Attempt] = {}
        self._open_tries: dict[str, AttemptSpec] = {}
        self._order = 0
        self._failure: BaseException | None = None
        self._draining = False

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rollout", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: Slots | None = None
        self._load = [0] * workers.size
        self._lives = [0] * workers.size  # how often each worker was started again
        self._restarting: dict[int, asyncio.Lock] = {}

    # ---- driver side -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the gateway and the workers inside the queue's thread. Raises what their start raises."""
        self._thread.start()
        self._in_loop(self._start()).result()

    def submit(self, spec: GroupSpec) -> None:
        """Queue a group. Attempts that `restore` brought back are taken as they are; only the others run."""
        with self._lock:
            if spec.group_id in self._groups:
                raise RL360Error(f"group {spec.group_id} was submitted twice")
            group = _OpenGroup(spec, self._order)
            self._order += 1
            self._groups[spec.group_id] = group
            for attempt in spec.attempts:
                if (done := self._replayed.pop(attempt.attempt_id, None)) is not None:
                    group.finished[attempt.attempt_id] = done
            open_specs = [a for a in spec.attempts if a.attempt_id not in group.finished]
        self._loop.call_soon_threadsafe(self._spawn, group, open_specs)

    def next(self, version: int, timeout_s: float, purpose: Purpose = Purpose.TRAIN) -> Group:
        """Block for a finished group of `purpose`. Deterministic queues give groups in submission order."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                if self._failure is not None:
                    raise self._failure
                if not self._thread.is_alive():
                    raise RL360Error("the rollout's thread has ended; its log is in logs/driver.log")
                if (group := self._take(purpose)) is not None:
                    del self._groups[group.spec.group_id]
                    return Group(group.spec, tuple(group.finished[a.attempt_id] for a in group.spec.attempts))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"no finished {purpose} group after {timeout_s:.0f} s; waiting for {self.waiting_for()}"
                    )
                self._lock.wait(min(left, 1.0))

    def drain(self) -> list[AttemptSpec]:
        """Cancel what is open; return the tries that had begun and did not finish."""
        with self._lock:
            self._draining = True
        if self._thread.is_alive():
            try:
                return self._in_loop(self._cancel_all()).result(STOP_GRACE_S + ANSWER_S)
            except TimeoutError:
                log.warning("the rollout's thread does not end its attempts: it has not answered for a while")
        with self._lock:
            return list(self._open_tries.values())

    def state(self) -> Mapping[str, Any]:
        """Finished attempts that no `next` has returned yet. The journal holds the same on disk."""
        with self._lock:
            return {"finished": [a for g in self._groups.values() for a in g.finished.values()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back finished attempts (`state["finished"]`); later submits of their groups do not run them again."""
        for attempt in state["finished"]:
            self._replayed[attempt.spec.attempt_id] = attempt

    def waiting_for(self) -> str:
        with self._lock:
            names = sorted(self._open_tries)
            queued = sum(len(g.spec.attempts) - len(g.finished) for g in self._groups.values()) - len(names)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"{len(names)} open tries ({shown or 'none'}), {max(queued, 0)} queued"

    def close(self) -> None:
        """Stop everything that `start` started. Safe to call twice, and after a failed start."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self.drain()
            try:
                self._in_loop(self._gateway.close()).result(GATEWAY_GRACE_S)
            except (TimeoutError, InfrastructureError) as error:
                log.warning("gateway did not close cleanly: %s", str(error) or f"not within {GATEWAY_GRACE_S:g} s")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_GRACE_S)
        self._workers.close()
        if not self._loop.is_running():
            self._loop.close()

    # ---- queue's thread ----------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _in_loop[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self) -> None:
        self._slots = Slots(self._concurrency)
        await asyncio.gather(asyncio.to_thread(self._workers.start), self._start_gateway())

    async def _start_gateway(self) -> None:
        await self._gateway.start()
        await self._gateway.verify()

    def _take(self, purpose: Purpose) -> _OpenGroup | None:
        ready = self._ready[purpose]
        if not ready:
            return None
        if not self._deterministic:
            return ready.popleft()
        first = min((g for g in self._groups.values() if g.spec.purpose is purpose), key=lambda g: g.order)
        if first not in ready:
            return None
        ready.remove(first)
        return first

    def _spawn(self, group: _OpenGroup, specs: Sequence[AttemptSpec]) -> None:
        if self._draining:
            return
        work = [(spec.attempt_id, self._run_attempt(group, spec)) for spec in specs]
        for name, coroutine in work or [(group.spec.group_id, self._complete(group))]:
            task = self._loop.create_task(coroutine, name=name)
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("attempt %s ended the rollout: %s", task.get_name(), error, exc_info=error)
        with self._lock:
            self._failure = self._failure or error
            self._lock.notify_all()

    async def _cancel_all(self) -> list[AttemptSpec]:
        """The tries that are open. Looked at here, where none can end or be requeued before it is cancelled."""
        with self._lock:
            begun = list(self._open_tries.values())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_S)
        return begun

    async def _run_attempt(self, group: _OpenGroup, spec: AttemptSpec) -> None:
        """Run tries of one attempt until one is final, then hand it to its group."""
        queued_at = time.monotonic()
        tries = 0  # of this process: a resume's tries do not use up the budget
        while True:
            tries += 1
            assert self._slots is not None
            async with self._slots.slot((group.spec.purpose is Purpose.TRAIN, group.order)):
                attempt, verdict = await self._run_try(spec, queued_at)
            if verdict.action is Action.ABORT:
                raise InfrastructureError(verdict.cause or "abort", f"{spec.try_id}: {_trial_error(attempt.trial)}")
            retry = verdict.action is Action.REQUEUE and tries < self._max_tries
            if not retry:
                break
            log.warning("requeue %s: %s (%s)", spec.try_id, verdict.cause, _trial_error(attempt.trial))
            self._events.requeued(spec, verdict.cause or "unknown")
            self._events.progress()
            spec = replace(spec, try_number=spec.try_number + 1, retry_of=spec.try_id)
            queued_at = time.monotonic()
            await asyncio.sleep(requeue_pause_s(tries))
        if not attempt.valid:
            where = attempt.trial.trial_dir if attempt.trial else "none"
            log.warning(
                "masked %s of task %s: %s (%s); its trial folder: %s",
                spec.try_id, spec.task.task_id, attempt.cause, _trial_error(attempt.trial), where,
            )  # fmt: skip
        self._events.finished(attempt)
        with self._lock:
            group.finished[spec.attempt_id] = attempt
        if group.complete:
            await self._complete(group)
        self._events.progress()

    async def _complete(self, group: _OpenGroup) -> None:
        """Score what needs the whole group, then offer it. The journal holds attempts as they were before this."""
        attempts = [group.finished[a.attempt_id] for a in group.spec.attempts]
        for index in unjudged_by_own_doing(attempts):
            log.warning("%s scores zero: %s", attempts[index].spec.try_id, attempts[index].cause)
            own = replace(attempts[index], stop=Stop.AGENT_ERROR)
            attempts[index] = await score_attempt(self._rewards, own, zero=True)
        attempts = await score_group(self._rewards, group.spec.task, attempts)
        with self._lock:
            group.finished = {a.spec.attempt_id: a for a in attempts}
            self._ready[group.spec.purpose].append(group)
            self._lock.notify_all()

    async def _run_try(self, spec: AttemptSpec, queued_at: float) -> tuple[Attempt, Verdict]:
        self._events.started(spec)
        with self._lock:
            self._open_tries[spec.try_id] = spec
        try:
            return await self._make_try(spec, queued_at)
        finally:  # the caller says what became of it before anything else runs in this thread
            with self._lock:
                self._open_tries.pop(spec.try_id, None)

    async def _make_try(self, spec: AttemptSpec, queued_at: float) -> tuple[Attempt, Verdict]:
        began = time.monotonic()
        session: Session | None = None
        try:
            url = await self._gateway.open(spec)
            trial = await self._run_trial(spec, url)
            session = await self._gateway.close_session(spec.try_id)
            verdict = classify(trial, session, self._agent_timeout_s)
        except InfrastructureError as error:
            trial = _lost_trial(spec, error)
            verdict = classify_cause(error.cause)
            await self._discard(spec)
        except asyncio.CancelledError:
            await asyncio.shield(self._discard(spec))
            raise
        timings = replace(
            trial.timings,
            queue_s=began - queued_at,
            engine_wait_s=session.engine_wait_s if session else 0.0,
            total_s=time.monotonic() - began,
        )
        attempt = Attempt(
            spec=spec,
            segments=session.segments if session else (),
            turns=session.turns if session else (),
            scores={},
            stop=verdict.stop,
            cause=verdict.cause,
            timings=timings,
            trial=trial,
            truncated_turns=session.truncated_turns if session else 0,
        )
        if verdict.action in (Action.TRAIN, Action.SCORE_ZERO):
            attempt = await score_attempt(self._rewards, attempt, zero=verdict.action is Action.SCORE_ZERO)
        return attempt, verdict

    async def _run_trial(self, spec: AttemptSpec, url: str) -> TrialResult:
        rank = min(range(self._workers.size), key=self._load.__getitem__)
        self._load[rank] += 1
        try:
            await self._revive(rank)
            return await self._call_worker(rank, spec, url)
        finally:
            self._load[rank] -= 1

    async def _call_worker(self, rank: int, spec: AttemptSpec, url: str) -> TrialResult:
        life = self._lives[rank]
        try:
            return await self._workers.call(rank, "run", spec, url, timeout_s=self._client_timeout_s)
        except TimeoutError as error:
            # The worker has a limit of its own for each trial, and a smaller one: it is the worker that hangs.
            await self._revive(rank, hung=life)
            raise InfrastructureError("trial_timeout", f"no answer from worker {rank}") from error
        except InfrastructureError:
            raise
        except RL360Error as error:
            raise InfrastructureError("worker_error", str(error)) from error

    async def _revive(self, rank: int, hung: int | None = None) -> None:
        """Start a dead worker again, once for all the calls that it took down.

        `hung` is the life that a caller gave up on: a worker that is still in it is killed first.
        """
        lock = self._restarting.setdefault(rank, asyncio.Lock())
        async with lock:
            if not self._workers.alive(rank) or hung == self._lives[rank]:
                log.warning("starting trial worker %d again", rank)
                await asyncio.to_thread(self._workers.restart, rank)
                self._lives[rank] += 1

    async def _discard(self, spec: AttemptSpec) -> None:
        for _ in range(DISCARD_TRIES):
            try:
                await asyncio.wait_for(self._gateway.discard(spec.try_id), STOP_GRACE_S)
                break
            except (TimeoutError, InfrastructureError) as error:
                log.warning("session %s was not discarded: %s", spec.try_id, error)
                if getattr(error, "cause", "proxy_timeout") != "proxy_timeout":
                    break  # a new proxy has none of it


def requeue_pause_s(tries: int) -> float:
    """Before the next try, after so many."""
    return min(REQUEUE_PAUSE_S * 2.0 ** min(tries - 1, 100), LONGEST_PAUSE_S)


def _trial_error(trial: TrialResult | None) -> str:
    return "no trial" if trial is None else f"{trial.exception_type}: {(trial.exception_message or '')[:300]}"


def _lost_trial(spec: AttemptSpec, error: InfrastructureError) -> TrialResult:
    return TrialResult(spec.try_id, None, type(error).__name__, str(error), {}, Timings(), Path())
