"""Attention over packed sequences on a CUDA device: one call, the fastest kernel that the machine has.

In: q, k, v of packed sequences, with the bounds of each. Out: attention outputs in q's packing, differentiable. Left to
others: rotary embedding, which keys a query may see beyond causal order (the caller cuts the keys), the CPU.

Two kernels: FlashAttention 4 (the package flash-attn-4, which SGLang brings; Hopper and newer) and torch's own
FlashAttention 2. On one H200, 32 query and 8 key/value heads of 128, two sequences of 8192: 636 and 574 TFLOP/s forward
and backward against 340 and 293. docs/decisions/0012-attention-kernel.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rl360.errors import ConfigError

KERNELS = ("auto", "fa4", "torch")
MIN_CAPABILITY_FA4 = (9, 0)

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


def attend_varlen(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    kernel: str = "auto",
) -> Tensor:
    """Causal attention of each packed sequence to its own keys, [N, H, D] in q's dtype.

    Axes: N packed queries, M packed keys, H query heads, K key/value heads (H a multiple of K), D head width.

    Args:
        q_NHD, k_MKD, v_MKD: bf16 or fp16, on one CUDA device.
        bounds_q, bounds_k: int32 [sequences + 1] on the device, 0 first, N and M last. A sequence may have fewer
            queries than keys: they are its last ones, so query i of n sees keys up to i + m - n of m.
        longest_q, longest_k: the greatest lengths, on the host.
        kernel: `auto`, or one of KERNELS by name.

    Raises:
        ConfigError: a kernel was asked for by name that is not here.
    """
    return _kernel(kernel, q_NHD.device)(q_NHD, k_MKD, v_MKD, bounds_q, bounds_k, longest_q, longest_k)


def kernel_name(device: torch.device, kernel: str = "auto") -> str:
    """Which kernel `attend_varlen` runs on this device: `fa4` or `torch`."""
    if kernel not in KERNELS:
        raise ConfigError(f"attention kernel {kernel!r}; expected one of {', '.join(KERNELS)}")
    if kernel != "auto":
        return kernel
    return "fa4" if torch.cuda.get_device_capability(device) >= MIN_CAPABILITY_FA4 and _import_fa4() else "torch"


@cache
def _kernel(kernel: str, device: torch.device) -> Kernel:
    if kernel_name(device, kernel) == "torch":
        return _torch_varlen
    if (function := _import_fa4()) is None:
        raise ConfigError("attention kernel 'fa4': flash-attn-4 cannot be imported; install it, or take 'torch'")

    def fa4(
        q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int
    ) -> Tensor:
        out = function(
            q,
            k,
            v,
            cu_seqlens_q=bounds_q,
            cu_seqlens_k=bounds_k,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return fa4


@cache
def _import_fa4() -> Callable[..., Tensor] | None:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception:  # its compiler's own imports fail in many ways where a library is missing
        return None
    return flash_attn_varlen_func


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # window (-1, 0): all of the past, none of the future.
    out = varlen_attn(q, k, v, bounds_q, bounds_k, longest_q, longest_k, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out
