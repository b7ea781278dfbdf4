"""The Megatron trainer's head on one GPU: time and memory of `head_loss` by chunk, against its three matrix products.

    python benchmarks/head.py                       # Qwen3-8B's head: 151936 x 4096, 8192 predicting positions
    python benchmarks/head.py --tensor-parallel 2   # one rank's half of it, without the exchange
    python benchmarks/head.py --logits both         # logits in fp32 and rounded to bf16 in turns, and what fp32 costs
    python benchmarks/head.py --engine-rows 1 64 256 # an engine's side instead: logits of so many sequences, four ways

The products are timed alone, at the same chunk, the weight's gradient added in fp32: the least that the head can take.
An engine's ways: `bf16`; `fp32_out`, bf16 products whose fp32 sums are kept, as RL360 computes them; `upcast_tf32` and
`upcast_fp32`, hidden states and weight upcast for each call as SGLang 0.5.16 does it for --enable-fp32-lm-head, with
and without --enable-tf32-matmul.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl360.algorithms.grpo import GRPO
from rl360.models.final_logits import final_logits
from rl360.trainers.megatron.head import HeadPredictions, head_loss

PADDING = 128  # rows of a rank are a multiple of it, as Megatron pads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--logits", choices=["fp32", "bf16", "both"], default="fp32")
    parser.add_argument("--engine-rows", type=int, nargs="+", default=[])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parsed = parser.parse_args()
    device = torch.device(parsed.device)
    dtype = torch.bfloat16
    rows = -(-parsed.vocab // (PADDING * parsed.tensor_parallel)) * PADDING
    torch.manual_seed(0)
    weight = torch.randn(rows, parsed.hidden, device=device, dtype=dtype) * 0.02
    if parsed.engine_rows:
        engine(weight, parsed.engine_rows, parsed.repeats)
        return
    hidden = torch.randn(parsed.positions, parsed.hidden, device=device, dtype=dtype).requires_grad_()
    head_grad = torch.zeros(rows, parsed.hidden, device=device)
    draw = np.random.default_rng(0)
    predictions = HeadPredictions.of(
        np.ones(parsed.positions, np.float32),
        np.arange(parsed.positions),
        draw.integers(min(rows, parsed.vocab), size=parsed.positions),
        device,
    )
    behaviour, ones = torch.full((parsed.positions,), -12.0, device=device), torch.ones(parsed.positions, device=device)
    weights = ones / parsed.positions
    algorithm = GRPO()

    def token_loss(tokens: slice, logprobs: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            current = logprobs.detach().requires_grad_()
            loss, _ = algorithm.loss(current, logprobs, behaviour[tokens], ones[tokens], weights[tokens], None)
            return torch.autograd.grad(loss, current)[0]

    for chunk in parsed.chunks:
        row: dict[str, float] = {"chunk": chunk}

        def products(chunk: int = chunk) -> None:
            with torch.no_grad():
                for part in hidden.detach().split(chunk):
                    logits = part @ weight.t()
                    logits @ weight
                    if device.type == "cuda":
                        torch.addmm(head_grad, logits.t(), part, out_dtype=torch.float32, out=head_grad)
                    else:
                        head_grad.addmm_(logits.t().float(), part.float())

        row["products_ms"] = milliseconds(products, parsed.repeats, device)
        ways = ("bf16", "fp32") if parsed.logits == "both" else (parsed.logits,)
        for compiled, way in itertools.product((False, True) if device.type == "cuda" else (False,), ways):

            def whole(chunk: int = chunk, compiled: bool = compiled, fp32: bool = way == "fp32") -> None:
                loss, _ = head_loss(
                    hidden,
                    weight,
                    predictions,
                    chunk,
                    token_loss,
                    head_grad,
                    vocab_size=parsed.vocab,
                    compiled=compiled,
                    fp32_logits=fp32,
                )
                loss.backward()
                hidden.grad = None

            name = f"{way}_{'compiled' if compiled else 'plain'}"
            row[f"{name}_ms"] = milliseconds(whole, parsed.repeats, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                whole()
                row[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        for kind in ("plain", "compiled"):
            if f"bf16_{kind}_ms" in row and f"fp32_{kind}_ms" in row:
                row[f"fp32_over_bf16_{kind}"] = row[f"fp32_{kind}_ms"] / row[f"bf16_{kind}_ms"]
        print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)


def upcast(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(hidden.float(), weight.float().t())


Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WAYS: dict[str, tuple[Way, bool]] = {  # name: (how, whether fp32 products may be TF32)
    "bf16": (lambda hidden, weight: torch.matmul(hidden, weight.t()).float(), False),
    "fp32_out": (lambda hidden, weight: final_logits(hidden, weight, fp32=True), False),
    "upcast_tf32": (upcast, True),
    "upcast_fp32": (upcast, False),
}


def engine(weight: torch.Tensor, rows: list[int], repeats: int) -> None:
    """Milliseconds and working memory of the logits of so many sequences, and their largest error against fp64."""
    for num_rows in rows:
        hidden = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
        exact = hidden[:4].double() @ weight[:4096].double().t()
        row: dict[str, float] = {"rows": num_rows}

        for name, (compute, tf32) in WAYS.items():
            torch.set_float32_matmul_precision("high" if tf32 else "highest")

            def several(compute: Way = compute, hidden: torch.Tensor = hidden) -> None:
                for _ in range(10):
                    compute(hidden, weight)

            row[f"{name}_ms"] = milliseconds(several, repeats, weight.device) / 10
            row[f"{name}_error"] = (compute(hidden, weight)[:4, :4096].double() - exact).abs().max().item()
            if weight.is_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                compute(hidden, weight)
                row[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        torch.set_float32_matmul_precision("highest")
        print(json.dumps({name: round(value, 5) for name, value in row.items()}), flush=True)


def milliseconds(function: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median of single runs, after two that compile and warm up."""
    times = []
    for number in range(repeats + 2):
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


if __name__ == "__main__":
    main()
