"""The queue with a gateway and workers in memory: order, retries, masking, replay, death, draining."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rl360.engine.codec import attempt_from_json, attempt_to_json
from rl360.errors import InfrastructureError, RL360Error, WorkerDied
from rl360.rewards.format_penalty import FormatPenalty
from rl360.rollout.queue import QueueRollout, RolloutEvents, requeue_pause_s
from rl360.rollout.specs import group_spec
from rl360.types import (
    Purpose,
    Sampling,
    Score,
    Segment,
    Session,
    Stop,
    Task,
    Timings,
    TrialResult,
    Turn,
    VersionSpan,
)

TASK = Task("task-a", Path("task-a"), ("coding",), "hash")


def make_group(size=2, slot=0, purpose=Purpose.TRAIN):
    return group_spec(seed=1, iteration=0, slot=slot, task=TASK, group_size=size, sampling=Sampling(), purpose=purpose)


class MemoryGateway:
    def __init__(self):
        self.open_sessions, self.discarded, self.closed = set(), [], False
        self.answers = True

    async def start(self): ...

    async def verify(self): ...

    async def open(self, spec):
        self.open_sessions.add(spec.try_id)
        return f"http://proxy/s/{spec.try_id}/v1"

    async def close_session(self, try_id):
        self.open_sessions.discard(try_id)
        ids = np.array([1, 2, 3], np.int32)
        mask = np.array([False, True, True])
        segment = Segment(ids, mask, np.array([0, -0.5, -0.25], np.float32), (VersionSpan(0, 1, 3),))
        turn = Turn((), {"role": "assistant", "content": "x"}, "stop", 1, 2, 0.5, 0)
        return Session((segment,), (turn,) if self.answers else (), None, None, 0.5)

    async def discard(self, try_id):
        self.open_sessions.discard(try_id)
        self.discarded.append(try_id)

    async def health(self):
        return True

    async def close(self):
        self.closed = True


class MemoryWorkers:
    """Runs `behave(spec)` in place of a trial; a returned exception class name becomes the trial's."""

    def __init__(self, behave, size=1):
        self.size, self._behave = size, behave
        self.seen, self.dead, self.restarts = [], set(), 0

    def start(self): ...

    async def call(self, rank, method, spec, url, timeout_s=None):
        assert method == "run"
        assert spec.try_id in url
        self.seen.append(spec.try_id)
        result = self._behave(spec)
        if asyncio.iscoroutine(result):
            result = await asyncio.wait_for(result, timeout_s)
        if isinstance(result, WorkerDied):
            self.dead.add(rank)
            raise result
        rewards, exception, *metadata = result
        said = metadata[0] if metadata else {}
        return TrialResult(spec.try_id, rewards, exception, None, said, Timings(agent_s=1.0), Path("x"))

    def alive(self, rank):
        return rank not in self.dead

    def restart(self, rank):
        self.restarts += 1
        self.dead.discard(rank)

    def close(self, grace_s=5.0): ...


class MemoryReward:
    name, scope, required = "verifier", "attempt", True

    async def score(self, task, attempts, deadline_s):
        return [Score(raw=a.trial.rewards["reward"], shaped=a.trial.rewards["reward"], success=True) for a in attempts]


class Recorder:
    def __init__(self):
        self.started, self.requeued, self.finished = [], [], []
        self.moved = 0

    def events(self):
        return RolloutEvents(
            started=lambda spec: self.started.append(spec.try_id),
            requeued=lambda spec, cause: self.requeued.append((spec.try_id, cause)),
            finished=self.finished.append,
            progress=self.progress,
        )

    def progress(self):
        self.moved += 1


@pytest.fixture
def make_queue():
    queues = []

    def make(behave, *, rewards=None, **overrides):
        workers, gateway, recorder = MemoryWorkers(behave), MemoryGateway(), Recorder()
        settings = {"concurrency": 8, "max_tries": 3, "agent_timeout_s": 10.0, "client_timeout_s": 5.0, **overrides}
        queue = QueueRollout(
            gateway=gateway,
            workers=workers,
            rewards=rewards if rewards is not None else {"verifier": MemoryReward()},
            events=recorder.events(),
            **settings,
        )
        queue.start()
        queues.append(queue)
        return queue, workers, gateway, recorder

    yield make
    for queue in queues:
        queue.close()


def test_a_group_comes_back_whole_in_the_order_of_its_attempts(make_queue):
    queue, _, gateway, recorder = make_queue(lambda spec: ({"reward": float(spec.attempt_id[-1])}, None))
    queue.submit(make_group(3))
    group = queue.next(0, 5.0)
    assert [a.reward for a in group.attempts] == [0.0, 1.0, 2.0]
    assert all(a.timings.engine_wait_s == 0.5 for a in group.attempts)
    assert gateway.open_sessions == set()
    assert len(recorder.finished) == 3


def test_infrastructure_is_retried_with_the_same_seed_then_masked(make_queue):
    queue, workers, _, recorder = make_queue(lambda spec: (None, "SandboxBuildFailedError"))
    queue.submit(make_group(1))
    (attempt,) = queue.next(0, 5.0).attempts
    base = attempt.spec.attempt_id
    assert workers.seen == [f"{base}.t0", f"{base}.t1", f"{base}.t2"]
    assert recorder.requeued == [(f"{base}.t0", "sandbox_build"), (f"{base}.t1", "sandbox_build")]
    assert not attempt.valid
    assert attempt.reward is None
    assert attempt.cause == "sandbox_build"
    assert attempt.spec.seed == make_group(1).attempts[0].seed


def test_one_bad_try_does_not_touch_the_group(make_queue):
    def behave(spec):
        bad = spec.attempt_id.endswith("-1") and spec.try_number == 0
        return (None, "InternalServerError") if bad else ({"reward": 1.0}, None)

    queue, _, _, _ = make_queue(behave)
    queue.submit(make_group(2))
    attempts = queue.next(0, 5.0).attempts
    assert [a.spec.try_number for a in attempts] == [0, 1]
    assert all(a.valid for a in attempts)


def test_a_dead_worker_is_started_again_and_its_attempts_requeued(make_queue):
    def behave(spec):
        return WorkerDied("worker_died", "killed") if spec.try_number == 0 else ({"reward": 1.0}, None)

    queue, workers, _, recorder = make_queue(behave)
    queue.submit(make_group(2))
    assert all(a.valid for a in queue.next(0, 5.0).attempts)
    assert workers.restarts >= 1
    assert {cause for _, cause in recorder.requeued} == {"worker_died"}


def test_a_trial_that_never_answers_is_cut(make_queue):
    async def hang():
        await asyncio.sleep(60)

    queue, workers, gateway, _ = make_queue(lambda spec: hang(), client_timeout_s=0.05, max_tries=1)
    queue.submit(make_group(3))
    attempts = queue.next(0, 5.0).attempts
    assert gateway.open_sessions == set()
    assert {a.cause for a in attempts} == {"trial_timeout"}
    assert {a.reward for a in attempts} == {None}
    assert workers.restarts == 1  # a worker that outlasts its own limits hangs: it is replaced, once for all its trials


@pytest.mark.parametrize(
    ("error", "cause"),
    [(InfrastructureError("proxy_session_lost", "gone"), "proxy_session_lost"), (RL360Error("a bug"), "worker_error")],
)
def test_what_a_worker_or_the_gateway_raises_costs_one_try(make_queue, error, cause):
    async def behave(spec):
        if spec.try_number == 0:
            raise error
        return {"reward": 1.0}, None

    queue, _, gateway, recorder = make_queue(behave)
    queue.submit(make_group(2))
    assert [a.reward for a in queue.next(0, 5.0).attempts] == [1.0, 1.0]
    assert [c for _, c in recorder.requeued] == [cause, cause]
    assert gateway.open_sessions == set()


def test_a_worker_that_cannot_be_started_again_ends_the_run(make_queue):
    queue, workers, _, _ = make_queue(lambda spec: WorkerDied("worker_died", "killed"))

    def restart(rank):
        raise InfrastructureError("worker_start", "no memory")

    workers.restart = restart
    queue.submit(make_group(1))
    with pytest.raises(InfrastructureError, match="worker_start"):
        queue.next(0, 5.0)


def test_requeues_count_as_progress(make_queue):
    """Tries that fail one after the other are not a stall, however long the group takes."""
    queue, _, _, recorder = make_queue(lambda spec: (None, "SandboxBuildFailedError"))
    queue.submit(make_group(1))
    queue.next(0, 5.0)
    assert recorder.moved == 3  # two requeues, one end


class BadReward:
    """Not required, and fails the way its name says."""

    required = False

    def __init__(self, name, scope="attempt"):
        self.name, self.scope = name, scope

    async def score(self, task, attempts, deadline_s):
        if self.name == "none":
            return []
        if self.name == "nan":
            return [Score(raw=None, shaped=float("nan")) for _ in attempts]
        raise KeyError("verifier")


@pytest.mark.parametrize("scope", ["attempt", "group"])
@pytest.mark.parametrize(
    ("name", "cause"),
    [("none", "reward_none_count"), ("nan", "reward_nan_not_finite"), ("raises", "reward_raises_KeyError")],
)
def test_a_reward_that_fails_masks_with_its_cause(make_queue, scope, name, cause):
    rewards = {"verifier": MemoryReward(), name: BadReward(name, scope)}
    queue, _, _, _ = make_queue(lambda spec: ({"reward": 1.0}, None), rewards=rewards)
    queue.submit(make_group(2))
    attempts = queue.next(0, 5.0).attempts
    assert [(a.valid, a.reward, a.cause) for a in attempts] == [(False, None, cause)] * 2


def test_authentication_ends_the_run(make_queue):
    queue, _, gateway, _ = make_queue(lambda spec: (None, "AuthenticationError"))
    gateway.answers = False
    queue.submit(make_group(1))
    with pytest.raises(InfrastructureError, match="authentication"):
        queue.next(0, 5.0)


def test_a_policy_that_ran_out_of_context_scores_zero(make_queue):
    queue, _, _, _ = make_queue(lambda spec: (None, "ContextLengthExceededError"))
    queue.submit(make_group(1))
    (attempt,) = queue.next(0, 5.0).attempts
    assert (attempt.reward, attempt.success, attempt.stop) == (0.0, False, Stop.LENGTH)


@pytest.mark.parametrize(
    ("others", "offline", "error", "reward"),
    [
        ({"reward": 1.0}, True, "VerifierTimeoutError", 0.0),
        ({"reward": 0.0}, True, "RewardFileNotFoundError", 0.0),
        ({"reward": 1.0}, False, "VerifierTimeoutError", None),  # the tests may have waited for the network
        (None, True, "VerifierTimeoutError", None),  # they never judged anything: the task may be broken
        ({"reward": 1.0}, True, "SandboxDied", None),  # the machine's failure stays one
    ],
)
def test_tests_that_judged_the_others_blame_what_they_hang_on(make_queue, others, offline, error, reward):
    def behave(spec):
        odd = spec.attempt_id.endswith("-1") or others is None
        return (None, error, {"offline": offline}) if odd else (others, None, {"offline": offline})

    queue, workers, _, _ = make_queue(behave, max_tries=1)
    queue.submit(make_group(3))
    attempts = queue.next(0, 5.0).attempts
    assert attempts[1].reward == reward
    assert attempts[1].valid is (reward is not None)
    assert attempts[1].stop is (Stop.INFRASTRUCTURE if reward is None else Stop.AGENT_ERROR)
    assert attempts[1].cause is not None
    assert attempts[1].num_sampled_tokens == 2
    assert len(workers.seen) == 3  # no other try: it would find the same


def test_replayed_attempts_do_not_run_again(make_queue):
    first, _, _, _ = make_queue(lambda spec: ({"reward": 1.0}, None))
    first.submit(make_group(2))
    done = first.next(0, 5.0).attempts[0]

    second, workers, _, _ = make_queue(lambda spec: ({"reward": 0.0}, None))
    second.restore({"finished": [done]})
    second.submit(make_group(2))
    rewards = [a.reward for a in second.next(0, 5.0).attempts]
    assert rewards == [1.0, 0.0]
    assert workers.seen == [f"{make_group(2).attempts[1].attempt_id}.t0"]


def test_deterministic_queues_give_groups_in_submission_order(make_queue):
    async def later(spec):
        await asyncio.sleep(0.1 if "-000-" in spec.group_id else 0.0)
        return {"reward": 1.0}, None

    queue, _, _, _ = make_queue(later, deterministic=True)
    for slot in (0, 1):
        queue.submit(make_group(1, slot))
    assert [queue.next(0, 5.0).spec.group_id for _ in range(2)] == [make_group(1, s).group_id for s in (0, 1)]


def test_evaluation_and_training_do_not_mix(make_queue):
    queue, _, _, _ = make_queue(lambda spec: ({"reward": 1.0}, None))
    queue.submit(make_group(1, purpose=Purpose.EVAL))
    with pytest.raises(TimeoutError):
        queue.next(0, 0.2, Purpose.TRAIN)
    assert queue.next(0, 5.0, Purpose.EVAL).spec.purpose is Purpose.EVAL


def test_drain_names_what_was_open_and_discards_its_sessions(make_queue):
    async def hang():
        await asyncio.sleep(60)

    queue, _, gateway, recorder = make_queue(lambda spec: hang())
    queue.submit(make_group(2))
    while len(recorder.started) < 2:
        pass
    begun = {spec.try_id for spec in queue.drain()}
    assert begun == {a.try_id for a in make_group(2).attempts}
    assert set(gateway.discarded) <= begun
    assert gateway.open_sessions == set()


def test_drain_does_not_name_a_try_that_is_requeued_meanwhile(make_queue, monkeypatch):
    """Two outcomes of one try are an error of the ledger: a stop would end there, before its checkpoint."""
    ended = threading.Event()

    async def dies_at_the_stop():
        await asyncio.to_thread(ended.wait, 20)
        return None, "SandboxDied"

    queue, _, _, recorder = make_queue(lambda spec: dies_at_the_stop())
    in_loop = queue._in_loop

    def late(coroutine):
        ended.set()
        while not recorder.requeued:
            time.sleep(0.001)
        return in_loop(coroutine)

    queue.submit(make_group(1))
    while not recorder.started:
        time.sleep(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "_in_loop", late)
        begun = [spec.try_id for spec in queue.drain()]
    assert set(recorder.started) == {*begun, *(try_id for try_id, _ in recorder.requeued)}
    assert len(recorder.started) == len(begun) + len(recorder.requeued)


def test_drain_names_a_try_that_waits_for_its_score(make_queue):
    asked = threading.Event()

    class Slow(MemoryReward):
        async def score(self, task, attempts, deadline_s):
            asked.set()
            await asyncio.sleep(60)

    queue, _, _, recorder = make_queue(lambda spec: ({"reward": 1.0}, None), rewards={"verifier": Slow()})
    queue.submit(make_group(1))
    assert asked.wait(20)
    assert [spec.try_id for spec in queue.drain()] == recorder.started
    assert recorder.finished == []


def test_a_stop_goes_on_when_something_blocks_the_queues_thread(make_queue, monkeypatch):
    async def hang():
        await asyncio.sleep(60)

    queue, _, _, recorder = make_queue(lambda spec: hang())
    queue.submit(make_group(1))
    while not recorder.started:
        time.sleep(0.001)
    release = threading.Event()
    queue._loop.call_soon_threadsafe(release.wait, 20)
    with monkeypatch.context() as patch:
        patch.setattr("rl360.rollout.queue.ANSWER_S", 0.05)
        patch.setattr("rl360.rollout.queue.STOP_GRACE_S", 0.05)
        assert [spec.try_id for spec in queue.drain()] == recorder.started
    release.set()


def test_a_session_that_a_standing_proxy_opened_late_is_discarded(make_queue):
    queue, _, gateway, recorder = make_queue(lambda spec: ({"reward": 1.0}, None))
    real_open, real_discard, lost = gateway.open, gateway.discard, []

    async def late(spec):
        url = await real_open(spec)
        if spec.try_number == 0:
            raise InfrastructureError("proxy_timeout", "no answer")
        return url

    async def standing_still(try_id):
        if not lost:
            lost.append(try_id)
            raise InfrastructureError("proxy_timeout", "no answer")
        await real_discard(try_id)

    gateway.open, gateway.discard = late, standing_still
    queue.submit(make_group(1))
    (attempt,) = queue.next(0, 10.0).attempts
    assert (attempt.valid, [cause for _, cause in recorder.requeued]) == (True, ["proxy_timeout"])
    assert gateway.discarded == lost
    assert gateway.open_sessions == set()


def test_a_group_reward_sees_the_whole_group(make_queue):
    class Rank:
        name, scope, required = "rank", "group", False

        async def score(self, task, attempts, deadline_s):
            return [Score(raw=i, shaped=10.0 * i) for i, _ in enumerate(attempts)]

    queue, _, _, _ = make_queue(
        lambda spec: ({"reward": 1.0}, None), rewards={"verifier": MemoryReward(), "rank": Rank()}
    )
    queue.submit(make_group(3))
    assert [a.reward for a in queue.next(0, 5.0).attempts] == [1.0, 11.0, 21.0]


def test_numbers_of_other_libraries_become_plain_ones(make_queue):
    """As a tensor, a reward was written down as its repr and could not be read again."""

    class Tensors:
        name, scope, required = "tensors", "attempt", True

        async def score(self, task, attempts, deadline_s):
            return [Score(raw=None, shaped=torch.tensor(0.5), success=np.float64(0.5) > 0.25)]

    queue, _, _, _ = make_queue(
        lambda spec: ({"reward": 1.0}, None, {"format_ok": False}),
        rewards={"tensors": Tensors(), "form": FormatPenalty("form", 0.125, verifier="tensors")},
    )
    queue.submit(make_group(1))
    (attempt,) = queue.next(0, 5.0).attempts
    assert (attempt.reward, attempt.success) == (0.375, True)  # numpy's True is a success that pays the penalty
    again = attempt_from_json(json.loads(json.dumps(attempt_to_json(attempt))))
    assert (again.scores, again.reward) == (attempt.scores, 0.375)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ([1.0], "reward_odd_AttributeError"),
        ([True], "reward_odd_AttributeError"),
        ([Score(raw=None, shaped="b")], "reward_odd_TypeError"),
        ([Score(raw=None, shaped="1.5")], "reward_odd_TypeError"),
        ([Score(raw=None, shaped=float("nan"))], "reward_odd_not_finite"),
        ([Score(raw=None, shaped=1e39)], "reward_odd_not_finite"),  # infinite in fp32
        ([], "reward_odd_count"),
        (SystemExit(1), "reward_odd_SystemExit"),
        (ValueError("no"), "reward_odd_ValueError"),
    ],
)
def test_a_reward_that_answers_badly_masks_the_attempt_and_the_run_goes_on(make_queue, answer, cause):
    class Odd:
        name, scope, required = "odd", "attempt", True

        async def score(self, task, attempts, deadline_s):
            if isinstance(answer, BaseException):
                raise answer
            return answer

    queue, _, _, _ = make_queue(
        lambda spec: ({"reward": 1.0}, None), rewards={"verifier": MemoryReward(), "odd": Odd()}
    )
    queue.submit(make_group(1))
    (attempt,) = queue.next(0, 5.0).attempts
    assert (attempt.valid, attempt.reward, attempt.cause) == (False, None, cause)


def test_a_group_reward_may_be_the_only_one_and_leaves_zeros_alone(make_queue):
    class Rank:
        name, scope, required = "rank", "group", True

        async def score(self, task, attempts, deadline_s):
            return [Score(raw=None, shaped=0.7) for _ in attempts]

    def behave(spec):
        return (None, "ContextLengthExceededError") if spec.attempt_id.endswith("-1") else ({"reward": 1.0}, None)

    queue, _, _, _ = make_queue(behave, rewards={"rank": Rank()})
    queue.submit(make_group(2))
    assert [a.reward for a in queue.next(0, 5.0).attempts] == [0.7, 0.0]


async def _wait(seconds):
    await asyncio.sleep(seconds)
    return {"reward": 1.0}, None


def order_of_starts(recorder):
    return [(try_id.split("-")[1], try_id.rsplit(".", 1)[1]) for try_id in recorder.started]


def test_a_second_try_of_an_old_group_goes_before_newer_groups(make_queue):
    """With one slot: the try that failed waits for its pause and then for one attempt, not for all that came later."""

    def behave(spec):
        return (None, "InternalServerError") if "-000-" in spec.try_id and spec.try_number == 0 else _wait(0.15)

    queue, _, _, recorder = make_queue(behave, concurrency=1)
    for slot in range(8):
        queue.submit(make_group(1, slot=slot))
    for _ in range(8):
        queue.next(0, 10.0)
    starts = order_of_starts(recorder)
    assert starts[0] == ("000", "t0")
    assert starts.index(("000", "t1")) <= 3
    assert [slot for slot, number in starts if number == "t0"] == [f"{slot:03d}" for slot in range(8)]


def test_evaluation_goes_before_training_that_runs_ahead(make_queue):
    queue, _, _, recorder = make_queue(lambda spec: _wait(0.05), concurrency=1)
    for slot in range(4):
        queue.submit(make_group(1, slot=slot))
    queue.submit(make_group(1, slot=9, purpose=Purpose.EVAL))
    queue.next(0, 10.0, Purpose.EVAL)
    assert [slot for slot, _ in order_of_starts(recorder)].index("009") == 1


def test_short_and_long_attempts_start_in_the_order_of_submission(make_queue):
    """A long attempt keeps its slot; nothing that was submitted later starts before what waits."""
    queue, _, _, recorder = make_queue(lambda spec: _wait(0.2 if "-000-" in spec.try_id else 0.01), concurrency=2)
    for slot in range(6):
        queue.submit(make_group(2, slot=slot))
    for _ in range(6):
        queue.next(0, 10.0)
    assert [slot for slot, _ in order_of_starts(recorder)] == [f"{slot:03d}" for slot in range(6) for _ in range(2)]


def test_no_try_is_waited_for_for_long():
    assert [requeue_pause_s(tries) for tries in (1, 2, 3, 20, 5000)] == [0.25, 0.5, 1.0, 15.0, 15.0]
