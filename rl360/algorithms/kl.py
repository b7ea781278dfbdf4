"""Estimators of a KL divergence from the logprobs of sampled tokens.

In: log p and log q of tokens sampled from p. Out: an estimate of KL(p || q) a token. Left to others: averaging.

Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, with p and q exchanged
(he samples from q). With log r = log q - log p:

    k1 = -log r                 unbiased, high variance, may be negative
    k2 = (log r)^2 / 2          biased, low variance, never negative
    k3 = (r - 1) - log r        unbiased, low variance, never negative

As a *loss* under samples of p they differ more: the gradient of k1 is zero in expectation, that of k2 is the gradient
of KL(p || q), that of k3 the gradient of KL(q || p) (Tang and Munos 2025, arXiv:2506.09477).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rl360.algorithms.correction import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Callable[["Tensor", "Tensor"], "Tensor"]


def k1(p_logprobs_N: Tensor, q_logprobs_N: Tensor) -> Tensor:
    return p_logprobs_N - q_logprobs_N


def k2(p_logprobs_N: Tensor, q_logprobs_N: Tensor) -> Tensor:
    return 0.5 * (q_logprobs_N - p_logprobs_N) ** 2


def k3(p_logprobs_N: Tensor, q_logprobs_N: Tensor) -> Tensor:
    log_ratio_N = q_logprobs_N - p_logprobs_N
    return bounded_exp(log_ratio_N) - 1.0 - log_ratio_N


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
