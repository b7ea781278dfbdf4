"""Attempts and groups of the algorithm's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rl360.types import (
    Attempt,
    AttemptSpec,
    Group,
    GroupSpec,
    Sampling,
    Score,
    Segment,
    Stop,
    Task,
    Timings,
    VersionSpan,
)

TASK = Task("add", Path("tasks/add"), ("coding",), "0" * 64)


def segment(prompt: int = 3, sampled: int = 2, logprob: float = -1.0) -> Segment:
    ids = np.arange(10, 10 + prompt + sampled, dtype=np.int32)
    mask = np.arange(ids.size) >= prompt
    return Segment(ids, mask, np.where(mask, np.float32(logprob), np.float32(0)), (VersionSpan(0, prompt, ids.size),))


def attempt(
    reward: float | None,
    *segments: Segment,
    number: int = 0,
    group: str = "g",
    stop: Stop = Stop.FINISHED,
    scored: bool = True,
    temperature: float = 1.0,
) -> Attempt:
    """An attempt with one score; reward None: the score is invalid; scored False: there is no score at all."""
    spec = AttemptSpec(f"{group}-{number}", group, 0, TASK, Sampling(temperature=temperature), seed=number)
    score = Score(reward, reward or 0.0, reward is not None, cause=None if reward is not None else "no_verdict")
    return Attempt(spec, segments, (), {"verifier": score} if scored else {}, stop, None, Timings(), None)


def group_of(*attempts: Attempt, group: str = "g") -> Group:
    return Group(GroupSpec(group, 0, TASK, tuple(a.spec for a in attempts)), attempts)


def rewards_group(*rewards: float | None, group: str = "g") -> Group:
    """One attempt with one segment a reward."""
    return group_of(*(attempt(r, segment(), number=i, group=group) for i, r in enumerate(rewards)), group=group)
