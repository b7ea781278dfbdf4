"""Correction for the engine not being the trainer, or not of today: a weight from the ratio proximal / behaviour.

In: proximal and behaviour logprobs of sampled tokens, or their difference summed over each sequence. Out: a detached
weight a token or sequence, truncated above and 0 outside a band. Left to others: the loss.

Axes: N trained tokens, S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# e^20 = 4.9e8: larger than any ratio that means something, small enough that products stay finite in fp32.
MAX_LOG_RATIO = 20.0
# e^-80 = 1.8e-35 weighs nothing and is a normal fp32 number: a long sequence inside the band keeps a weight that is not
# the 0 of what is masked, however small the product of its ratios.
MIN_LOG_RATIO = -80.0

LEVELS = ("token", "sequence")


def bounded_exp(log_ratio_N: Tensor) -> Tensor:
    """exp with its argument held to at most `MAX_LOG_RATIO`, so that one absurd token cannot make the loss infinite."""
    return log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """What a token's, or a sequence's, ratio proximal / behaviour makes of its weight.

    Truncation, min(ratio, cap): E. Ionides, "Truncated importance sampling", Journal of Computational and Graphical
    Statistics 17(2), 2008; between inference and training engines in Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training" (fengyao.notion.site/off-policy-rl). The cap is a constant here, where
    Ionides lets it grow with the sample size. Masking outside a band: IcePop (Ling team 2025, "Every step evolves",
    arXiv:2510.18855). What is masked keeps its place in the normaliser: a batch with much of it takes a smaller step.

    At sequence level the weight is the product of the ratios of a sequence's trained tokens, truncated: the weight of
    the whole sequence, where one a token ignores that earlier tokens decide which states are visited. The band is for
    the geometric mean of the ratios, which does not drift away from 1 with the length.

    Attributes:
        cap: largest weight; None: no weight at all, 1 inside the band.
        mask_below, mask_above: ends of the band; None: open.
    """

    cap: float | None = 2.0
    mask_below: float | None = None
    mask_above: float | None = None

    def of_tokens(self, proximal_N: Tensor, behaviour_N: Tensor) -> Tensor:
        """Return the weight of each token, detached.

        Args:
            proximal_N: the trainer's logprobs at the start of the step, fp32.
            behaviour_N: the engine's, as sampled.
        """
        log_ratio_N = (proximal_N - behaviour_N).detach()
        return self._weight(log_ratio_N, log_ratio_N)

    def of_sequences(self, log_ratio_sum_S: Tensor, token_count_S: Tensor) -> Tensor:
        """Return the weight of each sequence from the sum of its tokens' proximal - behaviour, and their number."""
        log_ratio_sum_S = log_ratio_sum_S.detach()
        return self._weight(log_ratio_sum_S, log_ratio_sum_S / token_count_S.clamp(min=1))

    def _weight(self, log_ratio: Tensor, banded: Tensor) -> Tensor:
        weight = log_ratio.new_ones(log_ratio.shape)
        if self.cap is not None:
            weight = bounded_exp(log_ratio.clamp(min=MIN_LOG_RATIO)).clamp(max=self.cap)
        if self.mask_below is not None:
            weight = weight.masked_fill(banded < math.log(self.mask_below), 0.0)
        if self.mask_above is not None:
            weight = weight.masked_fill(banded > math.log(self.mask_above), 0.0)
        return weight
