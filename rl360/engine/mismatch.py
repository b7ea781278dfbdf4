"""When engine and trainer are too far apart: the alarm, and the canary of a run that does not learn.

In: the scalars of each iteration and, at learning rate 0, a fingerprint of the weights that engines hold. Out: one more
scalar or two, a warning that says where to look, `MismatchAlarm` where the run is to stop. Left to others: measuring
(rl360.trainers.mismatch).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl360.errors import MismatchAlarm

log = logging.getLogger(__name__)

DIFFERENCE = "mismatch/logprob_diff_mean"
BASELINE_ROWS = 3  # of a canary: what later rows are compared with; a single row is noisy
# Differences below this are rounding of fp32 sums in another order: they may double from one batch to the next.
NOISE_NATS = 1e-5
WARN_AGAIN = 2.0  # an alarm that goes on is told again when it has grown by this factor
SAME_AT_START = 0.5  # the first tokens' KL as a part of all tokens' from which on the cause is not one of length


@dataclass(slots=True)
class MismatchWatch:
    """Looks at every iteration's scalars, once.

    Attributes:
        max_kl, max_ratio: limits of `mismatch/kl` and `mismatch/ratio_max`; None: none.
        canary: the learning rate is 0: weights must stay what they are, and the mismatch what it was.
        canary_growth: how much the mean difference of the last rows may exceed that of the first.
        stop: an alarm ends the run. Weights that change at learning rate 0 always do.
    """

    max_kl: float | None = None
    max_ratio: float | None = None
    canary: bool = False
    canary_growth: float = 1.5
    stop: bool = False
    _told: float = 0.0
    _differences: list[float] = field(default_factory=list)
    _steps: int = 0  # of a canary, measured ones; after a resume more than `_differences` holds
    _fingerprint: str | None = None
    _pending: str | None = None

    def begin(self, fingerprint: str | None, before: Mapping[str, Any] | None = None) -> None:
        """The weights that engines hold before the first step. `before`: what `baseline` said when the run was left.

        Raises MismatchAlarm when a resumed canary does not get back the weights that it was left with.
        """
        if before is not None:
            self._differences = [float(value) for value in before["differences"]]
            self._fingerprint = before["weights"]
            self._steps = int(before["steps"])
        if (changed := self._changed(fingerprint)) is not None:
            raise MismatchAlarm(f"{changed}: the run was left with others than it was resumed with")

    def baseline(self) -> dict[str, Any] | None:
        """What a resume needs to go on with the comparison, JSON-able; None where the run is no canary."""
        if not self.canary:
            return None
        rows = self._differences[:BASELINE_ROWS]
        return {"differences": rows, "weights": self._fingerprint, "steps": self._steps}

    def look(self, metrics: Mapping[str, float], fingerprint: str | None = None) -> dict[str, float]:
        """Scalars to log beside these. What is wrong is logged at once; `raise_alarm` comes after the row is written.

        `fingerprint`: of the weights that engines hold after this iteration; None: unknown.
        """
        self._pending = None
        if DIFFERENCE not in metrics:  # nothing was trained on
            return {}
        found = {}
        problems = self._over_limits(metrics)
        excess = max((size for size, _ in problems), default=0.0)
        if excess >= max(1.0, WARN_AGAIN * self._told):
            self._told = excess
            log.warning("%s. %s", "; ".join(text for _, text in problems), where_to_look(metrics))
        if not problems:
            self._told = 0.0
        texts = [text for _, text in problems]
        must_stop = self.stop
        if self.canary:
            drift = self._drift(metrics[DIFFERENCE])
            found["mismatch/canary_growth"] = self._growth()
            if drift is not None:
                log.warning("%s. %s", drift, where_to_look(metrics))
                texts.append(drift)
            changed = self._changed(fingerprint)
            if changed is not None:
                log.error("%s", changed)
                texts.append(changed)
                must_stop = True
        if texts and must_stop:
            self._pending = f"{'; '.join(texts)}. {where_to_look(metrics)}"
        found["mismatch/alarm"] = float(bool(texts))
        return found

    def raise_alarm(self) -> None:
        """Raises MismatchAlarm when the last row asks for the end of the run."""
        if self._pending is not None:
            raise MismatchAlarm(self._pending)

    def summary(self) -> str | None:
        """One line at the end of a canary run; None for others and before anything was measured."""
        if not self.canary or not self._differences:
            return None
        first, last = self._differences[0], self._differences[-1]
        weights = "weights not compared" if self._fingerprint is None else "weights unchanged"
        return (
            f"canary: {self._steps} steps at learning rate 0, {weights}; mean difference {first:.3g} nats "
            f"at first, {last:.3g} at last, growth {self._growth():.2f} (limit {self.canary_growth:g})"
        )

    def _over_limits(self, metrics: Mapping[str, float]) -> list[tuple[float, str]]:
        """(how many times the limit, what to say)."""
        return [
            (max(metrics[name] / limit, 1.0), f"{name} is {metrics[name]:.3g}, above {key} {limit:g}")
            for name, key, limit in (
                ("mismatch/kl", "mismatch.max_kl", self.max_kl),
                ("mismatch/ratio_max", "mismatch.max_ratio", self.max_ratio),
            )
            if limit is not None and not metrics.get(name, 0.0) <= limit
        ]

    def _drift(self, difference: float) -> str | None:
        self._differences.append(difference)
        self._steps += 1
        if len(self._differences) <= BASELINE_ROWS or self._growth() <= self.canary_growth:
            return None
        return (
            f"the canary drifts: at learning rate 0 the mean difference of engine and trainer is {self._growth():.2f} "
            f"times what it was (mismatch.canary_growth {self.canary_growth:g}); nothing was learnt, so it may not grow"
        )

    def _growth(self) -> float:
        """Of the mean over the last rows to the first ones; below the noise of fp32 it counts as none."""
        first, last = self._differences[:BASELINE_ROWS], self._differences[-BASELINE_ROWS:]
        return (sum(last) / len(last) + NOISE_NATS) / (sum(first) / len(first) + NOISE_NATS)

    def _changed(self, fingerprint: str | None) -> str | None:
        before, self._fingerprint = self._fingerprint, fingerprint or self._fingerprint
        if fingerprint is None or before is None or fingerprint == before:
            return None
        return f"the engines' weights changed at learning rate 0 (hash {before[:12]}, now {fingerprint[:12]})"


def where_to_look(metrics: Mapping[str, float]) -> str:
    """What these numbers say about the cause; see docs/guide/mismatch.md."""
    hints = []
    if (stale := metrics.get("rollout/staleness_max", 0.0)) > 0:
        hints.append(f"tokens up to {stale:g} versions old are in it: compare with rollout.max_staleness=0")
    whole = metrics.get("mismatch/kl", 0.0)
    at_start = metrics.get("mismatch/position/0-64/kl", whole)
    if at_start >= SAME_AT_START * whole:
        hints.append(
            "it is there from the first tokens on: look at the weights that engines hold (weight_version, hashes), "
            "the temperature, the dtype of the final logits"
        )
    else:
        hints.append(
            f"it grows with the place in the response ({at_start:.2g} in the first 64 tokens): look at the attention "
            "backend, positions (RoPE scaling), the dtype of the KV cache, prefixes cached under other weights"
        )
    return "; ".join(hints) + " (docs/guide/mismatch.md)"
