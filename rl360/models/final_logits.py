"""The product that makes final logits, for both trainers and the embedded engine: in fp32, or in the weights' dtype.

In: hidden states and rows of the output matrix. Out: their products, without a graph: trainers compute the gradient by
hand, the engine needs none. Left to others: temperature, softmax, and what SGLang does (rl360.serving.command).

bf16 has 8 significant bits, so a logit between 16 and 32 that is rounded to it lies on a grid of 0.125, and its token's
probability is off by up to 6 %. Products of bf16 values are exact in fp32 and tensor cores add them in fp32: keeping
the sum as it is costs no slower product, only four bytes a logit instead of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl360.models.linear import linear

# Rows of the output matrix that are upcast at once where no product takes bf16 and gives fp32 (the CPU).
UPCAST_ROWS = 4096

NARROW = (torch.bfloat16, torch.float16)


def logits_dtype(dtype: torch.dtype, fp32: bool) -> torch.dtype:
    """dtype of the logits that weights of `dtype` give: their own, but fp32 for narrow ones when `fp32`."""
    return torch.float32 if fp32 and dtype in NARROW else dtype


@torch.no_grad()
def final_logits(hidden_NC: Tensor, weight_VC: Tensor, fp32: bool, out_NV: Tensor | None = None) -> Tensor:
    """hidden [N, C] times weight [V, C] transposed -> [N, V] of `logits_dtype(weight's dtype, fp32)`, no graph.

    Both of one dtype and on one device. `out_NV`: a buffer of that shape and dtype, whose rows may be parts of longer
    ones; it is filled and returned.
    """
    if not (fp32 and hidden_NC.dtype in NARROW):
        if out_NV is None:
            return linear(hidden_NC, weight_VC)
        return torch.mm(hidden_NC, weight_VC.t(), out=out_NV)
    if out_NV is None:
        out_NV = hidden_NC.new_empty(hidden_NC.shape[0], weight_VC.shape[0], dtype=torch.float32)
    if hidden_NC.device.type == "cuda":
        return torch.mm(hidden_NC, weight_VC.t(), out_dtype=torch.float32, out=out_NV)
    wide_NC = hidden_NC.float()
    for start in range(0, weight_VC.shape[0], UPCAST_ROWS):
        rows = slice(start, start + UPCAST_ROWS)
        out_NV[:, rows] = linear(wide_NC, weight_VC[rows].float())
    return out_NV
