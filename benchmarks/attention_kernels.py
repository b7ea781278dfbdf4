"""Attention kernels for packed sequences on one GPU, at Qwen3-8B's heads (32 query, 8 key/value, 128 wide); bf16.

    python benchmarks/attention_kernels.py --json out.json

FlashAttention 4 (flash-attn-4) and torch's varlen attention (FlashAttention 2) through `attend_varlen`, and cuDNN
through torch's scaled_dot_product_attention where all sequences have one length. Forward, and backward alone; FLOPs at
half of the square, backward 2.5 times forward (its recomputation counted). Outputs are compared before any is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.roofline import timed_ms
from rl360.models.megatron.attention_cuda import attend_varlen

HEADS, KV_HEADS, WIDTH = 32, 8, 128
CASES = {
    "2 x 8192": [8192, 8192],
    "1 x 8192": [8192],
    "1 x 32768": [32768],
    "8 of 500-5000": [5000, 3000, 2500, 2000, 1500, 1200, 684, 500],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row for name, lengths in CASES.items() for row in measure(name, lengths)]
    for row in rows:
        print(
            " ".join(
                f"{key}={value:.1f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


def measure(name: str, lengths: list[int]) -> list[dict[str, Any]]:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    longest = max(lengths)

    def varlen(kernel: str) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: attend_varlen(q, k, v, bounds, bounds, longest, longest, kernel=kernel)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dense = (x.view(len(lengths), longest, -1, WIDTH).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)

    kernels = {"fa4": varlen("fa4"), "torch varlen": varlen("torch")}
    if len(set(lengths)) == 1:
        kernels["cudnn"] = cudnn
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    toward = torch.randn_like(q)
    flops = sum(4 * n * n / 2 * HEADS * WIDTH for n in lengths)
    rows: list[dict[str, Any]] = []
    first: torch.Tensor | None = None
    for kernel, attend in kernels.items():
        out = attend(q, k, v)
        first = out.detach() if first is None else first
        assert (out - first).abs().max() < 2e-2, f"{kernel} differs from the first kernel"

        def backward(out: torch.Tensor = out) -> None:
            torch.autograd.grad(out, (q, k, v), toward, retain_graph=True)

        forward_ms, backward_ms = timed_ms(lambda attend=attend: attend(q, k, v)), timed_ms(backward)
        rows.append(
            {
                "sequences": name,
                "kernel": kernel,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "forward_tflops": flops / forward_ms / 1e9,
                "backward_tflops": 2.5 * flops / backward_ms / 1e9,
            }
        )
    return rows


if __name__ == "__main__":
    main()
