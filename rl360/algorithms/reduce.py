"""From a loss a token to one number: the weight of every trained token.

In: the number of trained tokens of every attempt of the *global* batch. Out: the weight of one token of each attempt.
The normaliser is inside the weight, so a loss is the plain sum of weight x token loss, and the gradient does not depend
on how the batch is split into micro-batches or ranks. Left to others: which tokens are trained (grpo.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TokenWeights = Callable[[Sequence[int]], list[float]]


def token_mean(token_counts: Sequence[int]) -> list[float]:
    """Weigh every token of the global batch alike: 1 / total tokens.

    Source: the token-level loss of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.3, equation 12).

    Args:
        token_counts: trained tokens of each attempt; 0 where it has none.

    Returns:
        The weight of one token of each attempt; over all trained tokens the weights sum to 1.
    """
    total = sum(token_counts)
    return [1.0 / total if count else 0.0 for count in token_counts]


def sequence_mean(token_counts: Sequence[int]) -> list[float]:
    """Weigh every attempt alike, its tokens sharing the weight: 1 / (attempts with tokens x tokens of the attempt).

    Source: GRPO, DeepSeekMath (arXiv:2402.03300, equation 3): the mean over outputs of the mean over tokens. Segments
    of one attempt are one output here. Attempts without trained tokens do not count.
    """
    attempts = sum(count > 0 for count in token_counts)
    return [1.0 / (attempts * count) if count else 0.0 for count in token_counts]


REDUCERS: dict[str, TokenWeights] = {"token_mean": token_mean, "sequence_mean": sequence_mean}
