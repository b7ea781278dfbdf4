"""Verifier reward and format penalty, alone and summed, over every kind of verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.protocols import Reward
from rl360.rewards.format_penalty import FormatPenalty
from rl360.rewards.verifier import VerifierReward
from rl360.rollout.scoring import score_attempt
from rl360.types import Attempt, AttemptSpec, Sampling, Score, Stop, Task, Timings, TrialResult

TASK = Task(task_id="t", path=Path("t"), tags=("coding",), content_hash="0")
MISSING = object()


def attempt(rewards: object = MISSING, format_ok: object = MISSING, stop: Stop = Stop.FINISHED) -> Attempt:
    """An attempt with these verifier rewards; MISSING: no trial at all."""
    spec = AttemptSpec(attempt_id="a", group_id="g", iteration=0, task=TASK, sampling=Sampling(), seed=0)
    trial = None
    if rewards is not MISSING:
        trial = TrialResult(
            try_id=spec.try_id,
            rewards=rewards,  # type: ignore[arg-type]
            exception_type=None,
            exception_message=None,
            agent_metadata={} if format_ok is MISSING else {"format_ok": format_ok},
            timings=Timings(),
            trial_dir=Path("trial"),
        )
    return Attempt(spec=spec, segments=(), turns=(), scores={}, stop=stop, cause=None, timings=Timings(), trial=trial)


async def score_all(one: Attempt, *rewards: Reward) -> Attempt:
    """Score in order, each reward seeing what the earlier ones gave, as the rollout does."""
    for reward in rewards:
        (score,) = await reward.score(TASK, [one], deadline_s=1.0)
        one = replace(one, scores={**one.scores, reward.name: score})
    return one


def both() -> tuple[VerifierReward, FormatPenalty]:
    return VerifierReward("verifier"), FormatPenalty("format_penalty")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"reward": 1.0}, Score(raw=1.0, shaped=1.0, success=True)),
        ({"reward": 0}, Score(raw=0.0, shaped=0.0, success=False)),
        ({"reward": 0.5}, Score(raw=0.5, shaped=0.5, success=False)),
        ({"reward": -1.0}, Score(raw=-1.0, shaped=-1.0, success=False)),
        ({"reward": True}, Score(raw=1.0, shaped=1.0, success=True)),
        ({"tests_passed": 1.0}, Score(raw=1.0, shaped=1.0, success=True)),  # the only entry, whatever its name
        ({"reward": 1.0, "style": 0.0}, Score(raw=1.0, shaped=1.0, success=True)),
        ({"speed": 1.0, "style": 0.0}, Score(raw=None, shaped=0.0, valid=False, cause="no_verdict")),
        ({"reward": None}, Score(raw=None, shaped=0.0, valid=False, cause="no_verdict")),
        ({}, Score(raw=None, shaped=0.0, valid=False, cause="no_verdict")),
        (None, Score(raw=None, shaped=0.0, valid=False, cause="no_verdict")),
        (MISSING, Score(raw=None, shaped=0.0, valid=False, cause="no_verdict")),
        ({"reward": math.nan}, Score(raw=None, shaped=0.0, valid=False, cause="bad_verdict")),
        ({"reward": math.inf}, Score(raw=None, shaped=0.0, valid=False, cause="bad_verdict")),
        ({"reward": -math.inf}, Score(raw=None, shaped=0.0, valid=False, cause="bad_verdict")),
        ({"reward": "1.0"}, Score(raw=None, shaped=0.0, valid=False, cause="bad_verdict")),
    ],
)
async def test_the_verifiers_verdict(rewards: object, expected: Score) -> None:
    (score,) = await VerifierReward("verifier").score(TASK, [attempt(rewards)], deadline_s=1.0)
    assert score == expected


async def test_ending_before_a_verdict_never_pays_more_than_a_wrong_answer(caplog: pytest.LogCaptureFixture) -> None:
    reward = VerifierReward("tests", without_verdict=-0.5)
    verdicts = [attempt({"reward": r}) for r in (1.0, -0.5, -1.0, -0.75, -1.0)]
    await reward.score(TASK, verdicts, deadline_s=1.0)
    assert [r.message.split(",")[0] for r in caplog.records] == ["reward tests: a verdict of -1"]
    assert "set reward.tests.without_verdict to" in caplog.text
    ended = await score_attempt(
        {"tests": reward, "form": FormatPenalty("form", verifier="tests")}, attempt(), zero=True
    )
    assert ended.scores["tests"] == Score(raw=None, shaped=-0.5, success=False)
    assert ended.scores["form"] == Score(raw=None, shaped=0.0)
    assert (ended.reward, ended.success, ended.valid) == (-0.5, False, True)
    with pytest.raises(ValueError, match=r"reward.tests.without_verdict: nan; expected a finite number"):
        VerifierReward("tests", without_verdict=math.nan)


async def test_another_key_and_another_bar() -> None:
    reward = VerifierReward("speed", key="speed", success_at=0.8)
    slow, fast = await reward.score(
        TASK, [attempt({"speed": 0.79, "reward": 1.0}), attempt({"speed": 0.8, "reward": 0.0})], deadline_s=1.0
    )
    assert (slow.success, fast.success) == (False, True)
    assert (slow.shaped, fast.shaped) == (0.79, 0.8)


async def test_scores_come_in_the_attempts_order() -> None:
    attempts = [attempt({"reward": r}) for r in (0.25, 1.0, 0.0)]
    scores = await VerifierReward("verifier").score(TASK, attempts, deadline_s=1.0)
    assert [s.raw for s in scores] == [0.25, 1.0, 0.0]
    assert await VerifierReward("verifier").score(TASK, [], deadline_s=1.0) == []


@pytest.mark.parametrize(
    ("rewards", "format_ok", "reward", "success"),
    [
        ({"reward": 1.0}, True, 1.0, True),
        ({"reward": 1.0}, False, 0.7, True),  # 1 - 0.3, and still a success
        ({"reward": 1.0}, MISSING, 1.0, True),  # an agent that does not judge its form
        ({"reward": 1.0}, None, 1.0, True),
        ({"reward": 0.0}, False, 0.0, False),  # a failure pays nothing
        ({"reward": 0.5}, False, 0.5, False),
        (None, False, None, None),
        ({"reward": math.nan}, False, None, None),
        ({"reward": math.inf}, True, None, None),
        ({}, True, None, None),
        (MISSING, MISSING, None, None),
    ],
)
async def test_the_sum(rewards: object, format_ok: object, reward: float | None, success: bool | None) -> None:
    scored = await score_all(attempt(rewards, format_ok), *both())
    assert scored.reward == (None if reward is None else pytest.approx(reward))
    assert scored.success is success
    assert scored.valid is (reward is not None)


@pytest.mark.parametrize(("format_ok", "raw"), [(True, 0.0), (False, 1.0), (MISSING, None)])
async def test_the_raw_signal_is_the_share_of_bad_forms(format_ok: object, raw: float | None) -> None:
    scored = await score_all(attempt({"reward": 0.0}, format_ok), *both())
    assert scored.scores["format_penalty"].raw == raw


async def test_infrastructure_failures_have_no_reward_whatever_the_scores() -> None:
    scored = await score_all(attempt({"reward": 1.0}, True, stop=Stop.INFRASTRUCTURE), *both())
    assert scored.reward is None


async def test_the_penalty_needs_its_verifier_before_it() -> None:
    scored = await score_all(attempt({"reward": 1.0}, False), VerifierReward("tests"))
    with pytest.raises(KeyError, match="no score named verifier; earlier rewards: tests"):
        await score_all(scored, FormatPenalty("format_penalty"))
    with pytest.raises(KeyError, match="no score named verifier; earlier rewards: none"):
        await score_all(attempt({"reward": 1.0}, False), FormatPenalty("format_penalty"), VerifierReward("verifier"))
    named = await score_all(scored, FormatPenalty("format_penalty", penalty=0.5, verifier="tests"))
    assert named.reward == pytest.approx(0.5)


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward.format_penalty.penalty: -0.3; expected 0 or more"):
        FormatPenalty("format_penalty", penalty=-0.3)


def test_both_are_rewards() -> None:
    verifier, penalty = both()
    assert isinstance(verifier, Reward)
    assert isinstance(penalty, Reward)
    assert (verifier.name, verifier.required) == ("verifier", True)
    assert (penalty.name, penalty.required) == ("format_penalty", False)


verdicts = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(["reward", "other"]), st.one_of(st.none(), st.floats(), st.integers(-2, 2), st.booleans())
    ),
)


@given(verdicts, st.sampled_from([True, False, None]))
async def test_any_mix_gives_a_finite_reward_or_none_with_a_cause(
    rewards: Mapping[str, float] | None, format_ok: bool | None
) -> None:
    scored = await score_all(attempt(rewards, format_ok), *both())
    if scored.reward is None:
        assert any(s.cause for s in scored.scores.values())
        assert scored.success is None
    else:
        assert math.isfinite(scored.reward)
        assert scored.success in (True, False)
        assert scored.scores["format_penalty"].shaped in (0.0, -0.3)
        if not scored.success:
            assert scored.scores["format_penalty"].shaped == 0.0
