"""The least time of a train step's matrix products and attention on this machine's GPU, for train_step.py.

In: a model's shape, its layout, lengths of the sequences of a micro-batch. Out: milliseconds of one rank's products and
of its attention kernel, forward and backward, each timed alone at the shape that the step uses. Left to others: what is
made of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from rl360.models.decoder import DecoderConfig

LIMIT_S = 4.0  # of timing one kernel: attention over 131,072 tokens takes most of a second each time


class Roofline:
    """A worker: times products and attention alone, on a card that holds nothing else of this program."""

    def __init__(self, shape: DecoderConfig, args: argparse.Namespace, rank: int) -> None:
        self.shape, self.args = shape, args

    def products(self, lengths: tuple[int, ...]) -> dict[str, float]:
        """Milliseconds of one micro-batch's products on one rank, by part; forward and backward together."""
        import torch

        shape, args = self.shape, self.args
        device = torch.device("cuda", 0)
        tensor, context = args.tensor_parallel, args.context_parallel * args.one_of_context
        tokens = sum(lengths) // context
        predicting = sum(n - max(1, int(n * args.prompt_share)) for n in lengths) // context
        heads, kv_heads, width = shape.num_heads // tensor, shape.num_kv_heads // tensor, shape.head_dim
        products = {
            "qkv": (tokens, (heads + 2 * kv_heads) * width, shape.hidden_size),
            "out": (tokens, shape.hidden_size, heads * width),
            "gate_up": (tokens, 2 * shape.intermediate_size // tensor, shape.hidden_size),
            "down": (tokens, shape.hidden_size, shape.intermediate_size // tensor),
        }
        found = {}
        for name, (rows, out, inner) in products.items():
            found[name] = product_ms(rows, out, inner, device) * shape.num_layers
        chunk = min(args.logprob_chunk, predicting)
        found["head"] = product_ms(chunk, shape.vocab_size // tensor, shape.hidden_size, device) * predicting / chunk
        found["products"] = sum(found.values())
        return found

    def attention(self, lengths: tuple[int, ...]) -> dict[str, float]:
        """Those of its attention kernel."""
        import torch

        from rl360.models.megatron.attention_cuda import attend_varlen, kernel_name

        shape, args = self.shape, self.args
        device, kind = torch.device("cuda", 0), torch.bfloat16
        tensor, context = args.tensor_parallel, args.context_parallel * args.one_of_context
        heads, kv_heads, width = shape.num_heads // tensor, shape.num_kv_heads // tensor, shape.head_dim
        # One rank's queries: all of the sequences, or their last 1/context (late chunks see the most: scaled by pairs).
        bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        q, k, v = (
            torch.randn(sum(lengths), h, width, device=device, dtype=kind, requires_grad=True)
            for h in (heads, kv_heads, kv_heads)
        )
        toward = torch.randn_like(q)
        longest = max(lengths)

        def forward() -> Any:
            return attend_varlen(q, k, v, bounds, bounds, longest, longest)

        out = forward()

        def backward() -> None:
            torch.autograd.grad(out, (q, k, v), toward, retain_graph=True)

        print(f"attention kernel {kernel_name(device)}", flush=True)
        return {"attention": (timed_ms(forward) + timed_ms(backward)) * shape.num_layers / context}


def product_ms(rows: int, out: int, inner: int, device: Any) -> float:
    """A linear layer's three products: bf16, the weight's gradient added to an fp32 buffer."""
    import torch

    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    weight = torch.randn(out, inner, device=device, dtype=torch.bfloat16)
    grad = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
    main_grad = torch.zeros(out, inner, device=device)
    return (
        timed_ms(lambda: torch.nn.functional.linear(x, weight))
        + timed_ms(lambda: grad @ weight)
        + timed_ms(lambda: torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad))
    )


def timed_ms(run: Callable[[], Any], repeats: int = 10) -> float:
    """Mean of `repeats` runs after three that do not count; of fewer where so many would take LIMIT_S."""
    import torch

    def timed(number: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(number):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / number

    timed(1)  # compiles
    within_limit = int(LIMIT_S * 1e3 / timed(1)) - 1
    if within_limit < repeats:
        return timed(max(1, within_limit))
    timed(1)
    return timed(repeats)
