"""Scalars of one iteration from its groups. Pure: groups and outcomes in, names and numbers out.

Names and units are those of docs/guide/metrics.md. A mean over nothing is left out rather than written as zero or NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rl360.types import Attempt, Group, Outcome, OutcomeKind


def rollout_metrics(groups: Sequence[Group], kept: Sequence[Group], version: int) -> dict[str, float]:
    """Rewards, success, counts and phases of all training attempts of one iteration.

    `reward/*` means are over attempts that have a reward; masked ones have none. `reward/success_rate` is apart from
    penalties: it counts verdicts, not rewards.
    """
    attempts = [a for g in groups for a in g.attempts]
    valid = [a for a in attempts if a.valid]
    found: dict[str, float | None] = {
        "reward/unfiltered_mean": _mean(a.reward for a in valid),
        "reward/kept_mean": _mean(a.reward for g in kept for a in g.attempts if a.valid),
        "reward/success_rate": _mean(float(a.success) for a in valid if a.success is not None),
        "rollout/response_tokens_mean": _mean(a.num_sampled_tokens for a in valid),
        "rollout/turns_mean": _mean(len(a.turns) for a in valid),
        "rollout/truncated_share": _mean(float(a.truncated_turns > 0) for a in valid),
        "rollout/format_failures_mean": _mean(_format_failures(a) for a in valid),
        "rollout/forks": float(sum(s.fork_reason is not None for a in attempts for s in a.segments)),
        "rollout/groups_kept": float(len(kept)),
        "rollout/groups": float(len(groups)),
        "time/generate_s": _mean(a.timings.engine_wait_s for a in valid),
        "time/sandbox_s": _mean(a.timings.sandbox_s for a in valid),
        "time/verify_s": _mean(a.timings.verify_s for a in valid),
        "time/queue_s": _mean(a.timings.queue_s for a in valid),
    }
    ages = [version - v for g in groups if (v := g.oldest_version) is not None]
    found["rollout/staleness_max"] = float(max(ages)) if ages else None
    found |= _by_version(valid, version)
    found.update(_by_reward(valid))
    found.update(_by_domain(groups))
    return {name: value for name, value in found.items() if value is not None}


def _by_version(valid: Sequence[Attempt], version: int) -> dict[str, float | None]:
    """How old the sampled tokens are, and how many attempts went on over new weights."""
    num_tokens = 0
    total_age = 0
    mixed = []
    for attempt in valid:
        spans = [span for segment in attempt.segments for span in segment.version_spans]
        num_tokens += sum(span.end - span.start for span in spans)
        total_age += sum((version - span.version) * (span.end - span.start) for span in spans)
        mixed.append(float(len({span.version for span in spans}) > 1))
    return {
        "rollout/staleness_mean": total_age / num_tokens if num_tokens else None,
        "rollout/mixed_versions_share": _mean(mixed),
    }


def _format_failures(attempt: Attempt) -> int | None:
    """Replies of an attempt that its agent could not read; None for agents that do not count them."""
    count = attempt.trial.agent_metadata.get("format_failures") if attempt.trial is not None else None
    return count if isinstance(count, int) else None


def outcome_metrics(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """How many training attempts were trained, filtered and masked, masked ones by cause too."""
    counts: dict[str, float] = {f"rollout/samples_{k}": 0.0 for k in ("trained", "filtered", "masked", "stale")}
    for outcome in outcomes:
        counts[f"rollout/samples_{outcome.kind.value}"] += 1
        if outcome.kind is OutcomeKind.MASKED:
            name = f"rollout/masked/{outcome.reason}"
            counts[name] = counts.get(name, 0.0) + 1
    return counts


def _by_reward(valid: Sequence[Attempt]) -> Mapping[str, float | None]:
    names = {name for a in valid for name in a.scores}
    return {f"reward/{name}_mean": _mean(a.scores[name].shaped for a in valid if name in a.scores) for name in names}


def _by_domain(groups: Sequence[Group]) -> dict[str, float | None]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards[group.spec.task.domain].extend(a.reward for a in group.attempts if a.reward is not None)
    found: dict[str, float | None] = {}
    for domain, values in rewards.items():
        found[f"reward/domain/{domain}/mean"] = _mean(values)
        found[f"reward/domain/{domain}/count"] = float(len(values))
    return found


def _mean(values: Iterable[float | int | None]) -> float | None:
    numbers = [float(v) for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else None
