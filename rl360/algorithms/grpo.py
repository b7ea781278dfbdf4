"""GRPO with the relatives that one experiment chooses between: clip-higher, token mean, KL, truncated correction.

In: groups of finished attempts (`keep`, `prepare`), then logprobs of trained tokens (`loss`). Out: which groups to
train on, a `Batch` whose weights hold the global normaliser, a loss with metric sums. Left to others: logits, devices,
optimizer, entropy (the trainer), counting (the ledger).

Axes: N trained tokens of one micro-batch, T tokens of one segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from rl360.algorithms.advantage import group_relative
from rl360.algorithms.correction import LEVELS, ImportanceCorrection, bounded_exp
from rl360.algorithms.filter import FILTERS, differing_rewards, valid_reward
from rl360.algorithms.kl import ESTIMATORS
from rl360.algorithms.reduce import REDUCERS
from rl360.errors import ConfigError
from rl360.types import Attempt, Batch, Group, Keep, Segment, Sequence

if TYPE_CHECKING:
    from torch import Tensor


class GRPO:
    """Group relative policy optimisation (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300).

    With pi the current policy, pi_0 the proximal one (the trainer's at the start of the step), mu the behaviour (the
    engine's), a token's loss is

        -c * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * KL(pi || reference)
        r = pi / pi_0,  c = min(pi_0 / mu, importance_cap) or 0 outside a band, detached

    and the loss of a batch is the sum over trained tokens of weight x token loss. Clip bounds that differ are DAPO's
    clip-higher (Yu et al. 2025, arXiv:2503.14476, section 3.1, equation 10). The KL is an estimate from the sampled
    token (k3 is equation 4 of DeepSeekMath), added to the loss, not to the reward. Clipping against
    pi_0 while the weight is against mu is the decoupled objective of Hilton, Cobbe and Schulman 2022
    (arXiv:2110.00641), here with the weight truncated; asynchronous training steps on it (AReaL, Fu et al. 2025,
    arXiv:2505.24298). `ImportanceCorrection` says what c is at sequence level, and what the band is for.

    Raises:
        ConfigError: with every argument that makes no sense.
    """

    def __init__(
        self,
        normalize_std: bool = False,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        reducer: str = "token_mean",
        updates_per_batch: int = 1,
        importance_cap: float | None = 2.0,
        filter: str = "differing_rewards",
        importance_level: str = "token",
        importance_mask_below: float | None = None,
        importance_mask_above: float | None = None,
    ):
        below, above = importance_mask_below, importance_mask_above
        checks = {
            f"algorithm.clip_low: {clip_low}; expected between 0 and 1": 0.0 <= clip_low <= 1.0,
            f"algorithm.clip_high: {clip_high}; expected 0 or more": clip_high >= 0.0,
            f"algorithm.kl_coef: {kl_coef}; expected 0 (no reference model) or more": kl_coef >= 0.0,
            f"algorithm.kl_estimator: {kl_estimator!r}; expected one of {', '.join(ESTIMATORS)}": kl_estimator
            in ESTIMATORS,
            f"algorithm.reducer: {reducer!r}; expected one of {', '.join(REDUCERS)}": reducer in REDUCERS,
            f"algorithm.updates_per_batch: {updates_per_batch}; expected 1 or more": updates_per_batch >= 1,
            f"algorithm.importance_cap: {importance_cap}; expected above 0, or null for no correction": importance_cap
            is None
            or importance_cap > 0.0,
            f"algorithm.importance_level: {importance_level!r}; expected one of {', '.join(LEVELS)}": importance_level
            in LEVELS,
            f"algorithm.importance_mask_below: {below}; expected above 0, at most 1, or null for no such bound": below
            is None
            or 0.0 < below <= 1.0,
            f"algorithm.importance_mask_above: {above}; expected 1 or more, or null for no such bound": above is None
            or above >= 1.0,
            f"algorithm.filter: {filter!r}; expected one of {', '.join(FILTERS)}": filter in FILTERS,
        }
        if problems := [problem for problem, fine in checks.items() if not fine]:
            raise ConfigError(problems)
        self.normalize_std = normalize_std
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.reducer = reducer
        self.updates_per_batch = updates_per_batch
        self.importance_level = importance_level
        self.correction = ImportanceCorrection(importance_cap, below, above)
        self.filter = filter

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0.0

    @property
    def needs_sequence_ratios(self) -> bool:
        return self.importance_level == "sequence"

    def keep(self, group: Group) -> Keep:
        return differing_rewards(group) if self.filter == "differing_rewards" else Keep(True)

    def prepare(self, groups: SequenceABC[Group]) -> Batch:
        """Turn kept groups into the global batch.

        Every segment with sampled tokens of every attempt with a valid reward becomes one `Sequence`; segments of one
        attempt share its advantage. An attempt without a valid reward, or without sampled tokens, adds no sequence; the
        latter still takes part in its group's mean. The result may have no sequences.

        Raises:
            ValueError: a segment cannot be trained on (lengths differ, its first token is marked as sampled, a
                behaviour logprob of a sampled token is not finite, or the temperature is 0); names the try.
        """
        attempts: list[tuple[Attempt, float]] = []
        for group in groups:
            advantages = group_relative([valid_reward(attempt) for attempt in group.attempts], self.normalize_std)
            attempts += [(a, adv) for a, adv in zip(group.attempts, advantages, strict=True) if adv is not None]
        token_counts = [attempt.num_sampled_tokens for attempt, _ in attempts]
        weights = REDUCERS[self.reducer](token_counts)
        sequences = tuple(
            _sequence(attempt, segment, advantage, weight)
            for (attempt, advantage), weight in zip(attempts, weights, strict=True)
            for segment in attempt.segments
            if segment.loss_mask_T.any()
        )
        return Batch(sequences=sequences, num_trained_tokens=sum(token_counts), num_sequences=len(sequences))

    def sequence_correction(self, log_ratio_sum_S: Tensor, token_count_S: Tensor) -> Tensor:
        """Return each sequence's weight from the sum of its tokens' proximal - behaviour logprobs, and their number."""
        return self.correction.of_sequences(log_ratio_sum_S, token_count_S)

    def loss(
        self,
        current_N: Tensor,
        proximal_N: Tensor,
        behaviour_N: Tensor,
        advantages_N: Tensor,
        weights_N: Tensor,
        reference_N: Tensor | None,
        correction_N: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted sum of the token losses, and metrics.

        Args:
            current_N: logprobs that carry the gradient; all logprobs fp32 (or fp64), at the attempt's temperature.
            proximal_N, behaviour_N, reference_N: constants. reference_N is needed where `kl_coef` is above 0.
            advantages_N, weights_N: of the token, from `Sequence`.
            correction_N: with `needs_sequence_ratios`, each token's share of what `sequence_correction` gave.

        Returns:
            The loss (0-dim), and detached 0-dim metrics under their logged names. They are weighted sums that add up
            over micro-batches, but for names that end in `_max`, which take the maximum:
            `train/clip_fraction` share of tokens whose gradient the clip removed; `mismatch/correction_mean` mean c,
            where there is one; `mismatch/truncated_share` tokens whose c is the cap; `mismatch/masked_share` tokens
            outside the band, where there is one; `train/reference_kl` where a reference is used. How far proximal and
            behaviour are apart, every trainer measures by itself.
        """
        log_ratio_N = current_N - proximal_N.detach()
        ratio_N = bounded_exp(log_ratio_N)
        clipped_ratio_N = ratio_N.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        unclipped_N, clipped_N = ratio_N * advantages_N, clipped_ratio_N * advantages_N
        if not self.needs_sequence_ratios:
            correction_N = self.correction.of_tokens(proximal_N, behaviour_N)
        elif correction_N is None:
            raise ValueError("algorithm.importance_level is sequence, but the trainer gave no sequence corrections")
        losses_N = -correction_N * unclipped_N.minimum(clipped_N)

        metrics = {"train/clip_fraction": (weights_N * (clipped_N < unclipped_N)).sum()}
        cap, below, above = self.correction.cap, self.correction.mask_below, self.correction.mask_above
        if cap is not None:
            metrics["mismatch/correction_mean"] = (weights_N * correction_N).sum()
            metrics["mismatch/truncated_share"] = (weights_N * (correction_N >= cap)).sum()
        if below is not None or above is not None:
            metrics["mismatch/masked_share"] = (weights_N * (correction_N == 0.0)).sum()
        if self.needs_reference:
            if reference_N is None:
                raise ValueError("algorithm.kl_coef is above 0, but the trainer gave no reference logprobs")
            kl_N = ESTIMATORS[self.kl_estimator](current_N, reference_N)
            losses_N = losses_N + self.kl_coef * kl_N
            metrics["train/reference_kl"] = (weights_N * kl_N).sum()
        return (weights_N * losses_N).sum(), {name: value.detach() for name, value in metrics.items()}


def _sequence(attempt: Attempt, segment: Segment, advantage: float, weight: float) -> Sequence:
    mask_T = np.asarray(segment.loss_mask_T, dtype=np.bool_)
    temperature = attempt.spec.sampling.temperature
    where = f"try {attempt.spec.try_id}"
    if not (mask_T.shape == segment.token_ids_T.shape == segment.logprobs_T.shape):
        raise ValueError(f"{where}: token ids, loss mask and logprobs of a segment differ in length")
    if mask_T[0]:
        raise ValueError(f"{where}: the first token of a segment is marked as sampled, but nothing predicts it")
    if not np.isfinite(segment.logprobs_T[mask_T]).all():
        raise ValueError(f"{where}: a sampled token's behaviour logprob is not finite")
    if not temperature > 0.0:
        raise ValueError(f"{where}: sampled at temperature {temperature}; training needs a temperature above 0")
    return Sequence(
        token_ids_T=segment.token_ids_T,
        loss_mask_T=mask_T,
        behaviour_logprobs_T=segment.logprobs_T,
        advantages_T=np.where(mask_T, np.float32(advantage), np.float32(0.0)),
        weights_T=np.where(mask_T, np.float32(weight), np.float32(0.0)),
        temperature=temperature,
        group_id=attempt.spec.group_id,
        attempt_id=attempt.spec.attempt_id,
    )
