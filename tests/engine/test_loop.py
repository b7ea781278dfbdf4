"""The loop's decisions on groups made by hand: outcomes, the share of failures that ends a run, evaluation due."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from rl360.algorithms.grpo import GRPO
from rl360.engine.evaluation import summarize
from rl360.engine.loop import LoopSettings, TrainingLoop, throughput
from rl360.engine.state import RunState
from rl360.errors import EngineError, TooManyFailures
from rl360.types import Group, GroupSpec, OutcomeKind, Sampling, Stop, Update
from tests.engine.records import make_attempt, make_spec


class Record:
    """Remembers what it is told to write."""

    def __init__(self):
        self.written = []

    def outcomes(self, groups, outcomes):
        self.written.extend(outcomes)


class Dog:
    @contextmanager
    def stage(self, name):
        yield

    def progress(self): ...


def loop_with(kind=TrainingLoop, **overrides) -> TrainingLoop:
    settings = {
        "seed": 0,
        "iterations": 4,
        "group_size": 2,
        "tasks_per_iteration": 1,
        "sampling": Sampling(),
        "max_staleness": 0,
        "max_masked_share": 0.5,
        "evaluate_every": 2,
        "evaluate_at_start": False,
        "checkpoint_every": 0,
        **overrides,
    }
    return kind(
        settings=LoopSettings(**settings),
        state=RunState(),
        cursor=None,
        rollout=None,
        algorithm=GRPO(),
        trainer=None,
        sync=None,
        evaluator=None,
        record=Record(),
        checkpoints=None,
        watchdog=Dog(),
        stop_requested=lambda: False,
    )


def group(*rewards: float | None) -> Group:
    """One attempt for each reward; None: infrastructure failed under it."""
    attempts = []
    for member, reward in enumerate(rewards):
        attempt = make_attempt(make_spec(member=member), reward=0.0 if reward is None else reward)
        if reward is None:
            attempt = replace(attempt, scores={}, stop=Stop.INFRASTRUCTURE, cause="sandbox_died")
        attempts.append(attempt)
    spec = attempts[0].spec
    return Group(GroupSpec(spec.group_id, spec.iteration, spec.task, tuple(a.spec for a in attempts)), tuple(attempts))


def kinds(outcomes):
    return [(o.kind, o.reason) for o in outcomes]


def test_each_attempt_gets_one_outcome():
    loop = loop_with()
    loop.state = RunState(version=group(0.0, 1.0).oldest_version)
    outcomes, kept = loop.decide([group(0.0, 1.0, None)])
    assert kinds(outcomes) == [
        (OutcomeKind.TRAINED, None),
        (OutcomeKind.TRAINED, None),
        (OutcomeKind.MASKED, "sandbox_died"),
    ]
    assert len(kept) == 1


def test_equal_rewards_are_filtered_and_lonely_ones_too():
    loop = loop_with()
    loop.state = RunState(version=group(0.0).oldest_version)
    outcomes, kept = loop.decide([group(1.0, 1.0), group(1.0, None)])
    assert kept == []
    assert [o.kind for o in outcomes] == [OutcomeKind.FILTERED] * 3 + [OutcomeKind.MASKED]
    assert outcomes[0].reason == "equal_rewards"
    assert outcomes[2].reason == "too_few_valid"


def test_old_groups_are_stale_beyond_the_bound():
    loop = loop_with(max_staleness=1)
    version = group(0.0).oldest_version
    loop.state = RunState(version=version + 1)
    assert {o.kind for o in loop.decide([group(0.0, 1.0)])[0]} == {OutcomeKind.TRAINED}
    loop.state = RunState(version=version + 2)
    outcomes, kept = loop.decide([group(0.0, 1.0)])
    assert {o.kind for o in outcomes} == {OutcomeKind.STALE}
    assert kept == []


def test_tokens_of_a_version_that_does_not_exist_end_the_run():
    """Their staleness would be negative, which is below every bound."""
    loop = loop_with(max_staleness=3)
    version = group(0.0).oldest_version
    loop.state = RunState(version=version - 1)
    with pytest.raises(EngineError, match=rf"under version {version}; the trainer's is {version - 1}"):
        loop.decide([group(0.0, 1.0)])


def test_too_many_failures_end_the_run_with_everything_written_down():
    """Two of four is the share itself and goes on; three of four ends the run and names the causes."""
    loop = loop_with(max_masked_share=0.5)
    half = [group(0.0, 1.0), group(None, None)]
    loop.stop_if_too_many_failed(half, loop.decide(half)[0])
    most = [group(0.0, None), group(None, None)]
    with pytest.raises(TooManyFailures, match=r"3 of 4 attempts.*sandbox_died 3"):
        loop.stop_if_too_many_failed(most, loop.decide(most)[0])
    assert [o.kind for o in loop.record.written].count(OutcomeKind.MASKED) == 3
    assert [o.kind for o in loop.record.written].count(OutcomeKind.UNUSED) == 1  # nothing of it was trained on


def test_nothing_to_train_on_keeps_the_version():
    loop = loop_with()
    loop.state = RunState(version=7)
    update = loop.train([])
    assert (update.version, update.metrics["train/skipped"]) == (7, 1.0)


def test_the_trainer_steps_while_no_engine_reads_its_weights():
    events = []

    class Sync:
        @contextmanager
        def hold(self):
            events.append("held")
            yield
            events.append("released")

    class Trainer:
        def step(self, batch):
            events.append(f"step on {len(batch.sequences)}")
            return Update(1, {})

    loop = loop_with()
    loop.sync, loop.trainer = Sync(), Trainer()
    assert loop.train([group(0.0, 1.0)]).version == 1
    assert events == ["held", "step on 2", "released"]


def test_evaluation_is_due_once_each_time():
    due = []

    class Counting(TrainingLoop):
        def evaluate(self, evaluator):
            due.append(self.state.iteration)
            self.state = replace(self.state, last_evaluated=self.state.iteration)

    loop = loop_with(Counting, evaluate_every=2)
    loop.evaluator = object()
    for iteration in (0, 1, 2, 2, 3, 4):
        loop.state = replace(loop.state, iteration=iteration)
        loop.evaluate_if_due()
    assert due == [2, 4]


def test_an_evaluation_without_a_verdict_has_no_rate():
    assert summarize(0, 0, [group(None, None)]).success_rate is None
    report = summarize(0, 0, [group(0.0, 1.0, None)])
    assert (report.num_attempts, report.num_valid, report.reward_mean) == (3, 2, 0.5)


def test_null_context_is_a_hold_too():
    """External engines have weights of their own: nothing is held."""
    loop = loop_with()

    class Sync:
        def hold(self):
            return nullcontext()

    class Trainer:
        def step(self, batch):
            return Update(1, {"train/loss": 0.5})

    loop.sync, loop.trainer = Sync(), Trainer()
    assert loop.train([group(0.0, 1.0)]).metrics["train/loss"] == 0.5


def test_throughput_is_that_of_every_gpu_of_the_run():
    """Two GPUs train and six serve: four valid attempts in half an hour are one an hour and GPU."""
    groups = [group(0.0, 1.0, None), group(1.0, 1.0)]
    tokens = sum(a.num_sampled_tokens for g in groups for a in g.attempts)
    found = throughput({"time/step_s": 1800.0, "perf/gpus": 2.0}, groups, serving_gpus=6)
    assert found == {"perf/tokens_per_s": tokens / 1800.0, "perf/gpus": 8.0, "perf/trajectories_per_gpu_hour": 1.0}
    assert found.keys() - throughput({"time/step_s": 1800.0}, groups, serving_gpus=6).keys() == {
        "perf/gpus",
        "perf/trajectories_per_gpu_hour",
    }
