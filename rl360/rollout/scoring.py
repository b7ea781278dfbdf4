"""Scores of attempts from the run's rewards, whatever those do.

In: attempts with their trials, and rewards in config order. Out: the attempts with scores. Left to others: what a
reward measures (rl360.rewards), and what an attempt without a score means (the loop masks it).

A reward is often a user's own code. One that raises, answers for too few attempts or with no number masks the attempt
with a cause: a sum with a term missing is not comparable within its group. One that is late does so if it is required,
and adds nothing if it is not. Numbers of other libraries (numpy, torch) become Python's, which is what is written down.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rl360.protocols import Reward
from rl360.types import Attempt, Score, Stop, Task

log = logging.getLogger(__name__)

MAX_SHAPED = 1e6  # of either sign; beyond it nothing is left of a group's other rewards, and fp32 may overflow
REWARD_DEADLINE_S = 60.0  # one reward over one group; rewards here read what the trial already reported


async def score_attempt(rewards: Mapping[str, Reward], attempt: Attempt, *, zero: bool = False) -> Attempt:
    """Rewards of one attempt in config order; each sees the scores before it.

    `zero`: the policy ended it before a verdict. Every reward is then 0, or what its `without_verdict` says, and those
    that are required say no success.
    """
    for name, reward in rewards.items():
        if zero:
            shaped = getattr(reward, "without_verdict", 0.0)
            attempt = _with(attempt, name, Score(raw=None, shaped=shaped, success=False if reward.required else None))
        elif reward.scope == "attempt":
            (score,) = await _scores(name, reward, attempt.spec.task, [attempt])
            attempt = _with(attempt, name, score)
    return attempt


async def score_group(rewards: Mapping[str, Reward], task: Task, attempts: Sequence[Attempt]) -> list[Attempt]:
    """Rewards that compare the valid attempts of a group; the attempts come back in their order."""
    scored = list(attempts)
    for name, reward in rewards.items():
        valid = [index for index, attempt in enumerate(scored) if _scorable(attempt) and name not in attempt.scores]
        if reward.scope == "group" and valid:
            scores = await _scores(name, reward, task, [scored[index] for index in valid])
            for index, score in zip(valid, scores, strict=True):
                scored[index] = _with(scored[index], name, score)
    return scored


def _scorable(attempt: Attempt) -> bool:
    """Nothing under it failed so far. It may have no score yet: a group's reward can be the only one."""
    return attempt.stop is not Stop.INFRASTRUCTURE and all(score.valid for score in attempt.scores.values())


async def _scores(name: str, reward: Reward, task: Task, attempts: Sequence[Attempt]) -> list[Score]:
    """One score for each attempt."""
    valid = False
    try:
        async with asyncio.timeout(REWARD_DEADLINE_S):
            scores = list(await reward.score(task, attempts, REWARD_DEADLINE_S))
        scores = [_plain(score) for score in scores]  # what is no Score, or holds no number, ends here
    except TimeoutError:
        cause, valid = f"reward_{name}_timeout", not reward.required
    except (Exception, SystemExit) as error:  # a user's code: whatever it raises costs its score, not the run
        log.exception("reward %s of task %s failed", name, task.task_id)
        cause = f"reward_{name}_{type(error).__name__}"
    else:
        cause = f"reward_{name}_not_finite" if len(scores) == len(attempts) else f"reward_{name}_count"
        if len(scores) == len(attempts):
            return [score if abs(score.shaped) <= MAX_SHAPED else _no_score(cause) for score in scores]
    return [_no_score(cause, valid) for _ in attempts]


def _plain(score: Score) -> Score:
    shaped = float(score.shaped) if math.isfinite(score.shaped) else math.nan  # isfinite: a text is no number
    return replace(
        score,
        shaped=shaped,
        valid=bool(score.valid),
        success=None if score.success is None else bool(score.success),
    )


def _no_score(cause: str, valid: bool = False) -> Score:
    return Score(raw=None, shaped=0.0, valid=valid, cause=cause)


def _with(attempt: Attempt, name: str, score: Score) -> Attempt:
    cause = attempt.cause or (None if score.valid else score.cause or f"reward_{name}_invalid")
    return replace(attempt, scores={**attempt.scores, name: score}, cause=cause)
