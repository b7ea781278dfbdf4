"""Correction for the engine not being the trainer: the truncated importance weight proximal / behaviour.

In: proximal and behaviour logprobs of sampled tokens. Out: a detached weight a token. Left to others: the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# e^20 = 4.9e8: larger than any ratio that means something, small enough that products stay finite in fp32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio_N: Tensor) -> Tensor:
    """exp with its argument held to at most `MAX_LOG_RATIO`, so that one absurd token cannot make the loss infinite."""
    return log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()


def truncated_importance_weight(proximal_N: Tensor, behaviour_N: Tensor, cap: float | None) -> Tensor:
    """Return min(proximal / behaviour, cap), detached; ones where `cap` is None.

    Source: E. Ionides, "Truncated importance sampling", Journal of Computational and Graphical Statistics 17(2), 2008;
    between inference and training engines in Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training" (fengyao.notion.site/off-policy-rl). The cap is a constant here, where Ionides lets it grow
    with the sample size.

    Args:
        proximal_N: the trainer's logprobs at the start of the step, fp32.
        behaviour_N: the engine's, as sampled.
        cap: largest weight; None: no correction.
    """
    if cap is None:
        return proximal_N.detach().new_ones(proximal_N.shape)
    return bounded_exp((proximal_N - behaviour_N).detach()).clamp(max=cap)
