"""Small specs, attempts and outcomes for the tests of what a run keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl360.types import (
    Attempt,
    AttemptSpec,
    Outcome,
    OutcomeKind,
    Purpose,
    Sampling,
    Score,
    Segment,
    Stop,
    Task,
    Timings,
    TrialResult,
    Turn,
    VersionSpan,
)


def make_spec(
    iteration: int = 0, group: str = "a", member: int = 0, try_number: int = 0, purpose: Purpose = Purpose.TRAIN
) -> AttemptSpec:
    prefix = "e" if purpose is Purpose.EVAL else "i"
    group_id = f"{prefix}{iteration}-{group}"
    attempt_id = f"{group_id}-{member}"
    return AttemptSpec(
        attempt_id=attempt_id,
        group_id=group_id,
        iteration=iteration,
        task=Task(f"task-{group}", Path("tasks") / group, ("coding", "easy"), "0f" * 32),
        sampling=Sampling(stop=("\n\n",), stop_at_code_block=True),
        seed=2**62 + member,
        purpose=purpose,
        try_number=try_number,
        retry_of=f"{attempt_id}.t{try_number - 1}" if try_number else None,
    )


def make_attempt(spec: AttemptSpec, reward: float | None = 1.0, sampled: tuple[int, ...] = (5, 6, 7)) -> Attempt:
    """An attempt at three prompt tokens; without a reward it is one that infrastructure ended."""
    ids = np.array([1, 2, 3, *sampled], dtype=np.int32)
    mask = np.array([False] * 3 + [True] * len(sampled))
    logprobs = np.where(mask, -np.arange(len(ids)) / 7, 0.0).astype(np.float32)
    failed = reward is None
    return Attempt(
        spec=spec,
        segments=(Segment(ids, mask, logprobs, (VersionSpan(spec.iteration, 3, len(ids)),)),),
        turns=(
            Turn(({"role": "user", "content": "ä"},), {"role": "assistant", "content": "b"}, "stop", 3, 3, 0.25, 0),
        ),
        scores={} if reward is None else {"verifier": Score(reward, reward, success=reward >= 1.0)},
        stop=Stop.INFRASTRUCTURE if failed else Stop.FINISHED,
        cause="sandbox_died" if failed else None,
        timings=Timings(0.1, 0.2, 0.3, 0.25, 0.4, 1.1),
        trial=TrialResult(
            spec.try_id,
            None if reward is None else {"reward": reward},
            None,
            None,
            {"format_ok": True},
            Timings(),
            Path("trials") / spec.try_id,
            {"agent": "agent.log"},
        ),
    )


def outcome(spec: AttemptSpec, kind: OutcomeKind = OutcomeKind.TRAINED, reason: str | None = None) -> Outcome:
    return Outcome(spec.try_id, spec.attempt_id, spec.group_id, spec.iteration, spec.purpose, kind, reason)


def assert_same_attempt(left: Attempt, right: Attempt) -> None:
    """Equal in every field, arrays to the bit and the type."""
    assert len(left.segments) == len(right.segments)
    for one, other in zip(left.segments, right.segments, strict=True):
        for name in ("token_ids_T", "loss_mask_T", "logprobs_T"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
        assert (one.version_spans, one.parent, one.fork_reason) == (
            other.version_spans,
            other.parent,
            other.fork_reason,
        )
    # NaN differs from itself, so compare texts; repr of a float is exact.
    plain: dict[str, Any] = {"segments": ()}
    assert repr(replace(left, **plain)) == repr(replace(right, **plain))
