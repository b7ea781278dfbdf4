"""The least time of a train step's matrix products and attention on this machine's GPU, for train_step.py.

In: a model's shape, its layout, lengths of the sequences of a micro-batch. Out: milliseconds of one rank's products and
of its attention kernel, forward and backward, each timed alone at the shape that the step uses, and all of them twice:
ten times in a row on a card that was idle before (`products`, `attention`), and for SUSTAINED_S after as long a time of
the same (`sustained_products`, ...), since a card under load lowers its clocks, and a step lasts seconds. Left to
others: what is made of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rl360.models.decoder import DecoderConfig

SUSTAINED_S = 0.5
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
        chunk = min(args.logprob_chunk, predicting)
        times = dict.fromkeys(products, float(shape.num_layers)) | {"head": predicting / chunk}
        products["head"] = (chunk, shape.vocab_size // tensor, shape.hidden_size)
        found: dict[str, float] = {}
        for prefix, timer in TIMERS.items():
            parts = {name: product_ms(*size, device, timer) * times[name] for name, size in products.items()}
            found |= {prefix + name: ms for name, ms in parts.items()} | {f"{prefix}products": sum(parts.values())}
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
        return {
            f"{prefix}attention": (timer(forward) + timer(backward)) * shape.num_layers / context
            for prefix, timer in TIMERS.items()
        }


def product_ms(rows: int, out: int, inner: int, device: Any, timer: Callable[[Callable[[], Any]], float]) -> float:
    """A linear layer's three products: bf16, the weight's gradient added to an fp32 buffer."""
    import torch

    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    weight = torch.randn(out, inner, device=device, dtype=torch.bfloat16)
    grad = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
    main_grad = torch.zeros(out, inner, device=device)
    return (
        timer(lambda: torch.nn.functional.linear(x, weight))
        + timer(lambda: grad @ weight)
        + timer(lambda: torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad))
    )


def timed_ms(run: Callable[[], Any], repeats: int = 10) -> float:
    """Mean of `repeats` runs after three that do not count; of fewer where so many would take LIMIT_S."""
    _event_ms(run, 1)  # compiles
    within_limit = int(LIMIT_S * 1e3 / _event_ms(run, 1)) - 1
    if within_limit < repeats:
        return _event_ms(run, max(1, within_limit))
    _event_ms(run, 1)
    return _event_ms(run, repeats)


def sustained_ms(run: Callable[[], Any]) -> float:
    """Mean of the runs of SUSTAINED_S, at least two, behind as many that do not count. `run` is compiled already."""
    number = max(2, math.ceil(SUSTAINED_S * 1e3 / _event_ms(run, 1)))
    _event_ms(run, number)
    return _event_ms(run, number)


def _event_ms(run: Callable[[], Any], number: int) -> float:
    """Mean milliseconds of the GPU for one of `number` runs in a row."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(number):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / number


TIMERS: dict[str, Callable[[Callable[[], Any]], float]] = {"": timed_ms, "sustained_": sustained_ms}
