"""x @ w.T on the CPU, as fast as the machine allows and always exact fp32; forward and backward.

In: activations [N, in] and weights [out, in]. Out: products, differentiable in both. Which library is faster and why
is written down in docs/decisions/cpu-linear.md; other devices and dtypes go to torch's own linear.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x [..., in] times w [out, in] transposed -> [..., out]."""
    return functional.linear(x, w)


def joined_linear(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`linear` with several weights that share an input -> one result each."""
    return tuple(linear(x, w) for w in weights)
