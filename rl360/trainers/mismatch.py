"""How far the engine's logprobs are from the trainer's: one measurement for every trainer and every algorithm.

In: proximal and behaviour logprobs of a micro-batch's trained tokens, their weights in the loss, their places in the
response. Out: sums that add up over micro-batches and ranks (maxima for names that end in `_max`), and what the added
sums mean. Left to others: when it is too much (rl360.engine.mismatch), what the loss does about it (the algorithm).

By place in the response, because the cause shows there: other weights, another temperature or other logits differ from
the first token on; attention, positions and a cache of low precision drift apart as the context grows.

Axes: N trained tokens of one micro-batch, B ranges of places.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# A token's place counts the sampled tokens of its sequence from 0, whatever tools said in between.
RANGE_ENDS = (64, 256, 1024)
RANGES = ("0-64", "64-256", "256-1024", "1024-up")
MAX_LOG_RATIO = 20.0  # e^20 is beyond any ratio that means something; one absurd token must not make sums infinite


def mismatch_sums(proximal_N: Tensor, behaviour_N: Tensor, weights_N: Tensor, places_N: Tensor) -> dict[str, Tensor]:
    """Weighted sums and maxima over the tokens of one micro-batch, 0-dim, without a gradient.

    The KL estimate is k3 of KL(behaviour || proximal) (see rl360.algorithms.kl), written with expm1: for the small
    differences of two fp32 computations, exp(d) - 1 - d would be nothing but rounding.

    Args:
        proximal_N: the trainer's logprobs at the start of the step, at the attempt's temperature.
        behaviour_N: the engine's, as sampled.
        weights_N: of the token in the loss; over the global batch they sum to 1.
        places_N: int64, the token's index among the sampled tokens of its sequence.
    """
    difference_N = (proximal_N - behaviour_N).detach()
    bounded_N = difference_N.clamp(max=MAX_LOG_RATIO)
    kl_N = weights_N * (bounded_N.expm1() - difference_N)
    size_N = difference_N.abs()
    range_N = torch.bucketize(places_N, torch.tensor(RANGE_ENDS, device=places_N.device), right=True)
    sums_3B = difference_N.new_zeros(3, len(RANGES))
    for row, values_N in enumerate((weights_N.to(difference_N.dtype), kl_N, weights_N * size_N)):
        sums_3B[row].index_add_(0, range_N, values_N.to(difference_N.dtype))
    ratio_max_B = difference_N.new_zeros(len(RANGES)).scatter_reduce_(0, range_N, bounded_N.exp(), "amax")
    found = {
        "mismatch/kl": sums_3B[1].sum(),
        "mismatch/logprob_diff_mean": sums_3B[2].sum(),
        "mismatch/logprob_diff_max": size_N.max(),
        "mismatch/ratio_max": ratio_max_B.max(),
    }
    for index, name in enumerate(RANGES):
        found[f"mismatch/position/{name}/share"] = sums_3B[0, index]
        found[f"mismatch/position/{name}/kl"] = sums_3B[1, index]
        found[f"mismatch/position/{name}/logprob_diff_mean"] = sums_3B[2, index]
        found[f"mismatch/position/{name}/ratio_max"] = ratio_max_B[index]
    return found


def mismatch_means(totals: Mapping[str, float]) -> dict[str, float]:
    """All totals, those of each range divided by its share of the weight; ranges without tokens are left out."""
    found = dict(totals)
    for name in RANGES:
        kl, difference = f"mismatch/position/{name}/kl", f"mismatch/position/{name}/logprob_diff_mean"
        share, ratio = f"mismatch/position/{name}/share", f"mismatch/position/{name}/ratio_max"
        if share not in found:
            continue
        if found[share] > 0.0:
            found[kl] /= found[share]
            found[difference] /= found[share]
        else:
            for absent in (share, kl, difference, ratio):
                del found[absent]
    return found
