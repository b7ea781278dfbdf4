"""Decoding speed of the embedded engine on the CPU, beside transformers' generate, in one run on one model.

In: an HF folder. Out: a table of output tokens per second at several batch sizes; prompts differ, so no prefill is
shared, and both sample at temperature 1 for the same number of tokens. Tokens per CPU-second
(prefill included) stay meaningful on a machine that others use too, with --threads 1. `--profile` adds where a step's
time goes.

    python benchmarks/decode_cpu.py --model ~/.cache/rl360/models/smollm2_135m
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import torch

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.sampling import SamplingParams
from rl360.models.loading import load_decoder


def make_prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(100, vocab - 100, (batch, length), generator=generator).tolist()


def engine_seconds(engine: EmbeddedEngine, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """(prefill, decode) seconds: up to the first token of the last row, and from there to the end."""
    done = [threading.Event() for _ in prompts]
    firsts: list[float] = []
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=1.0, sampling_seed=1)
    start = time.perf_counter()
    with engine.drain():
        for index, prompt in enumerate(prompts):
            seen = threading.Event()

            def first(seen: threading.Event = seen) -> None:
                if not seen.is_set():
                    seen.set()
                    firsts.append(time.perf_counter())

            engine.submit(prompt, params, f"b{index}", done[index].set, first)
    for event in done:
        event.wait()
    end = time.perf_counter()
    return max(firsts) - start, end - max(firsts)


def transformers_seconds(model: object, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    ids = torch.tensor(prompts)
    common = {"do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}

    def run(count: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **common)  # type: ignore[attr-defined]
        return time.perf_counter() - start

    prefill = run(1)
    return prefill, run(new_tokens) - prefill


def profile(engine: EmbeddedEngine, prompts: list[list[int]], new_tokens: int) -> None:
    engine.close()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            engine._closing = False
            engine.submit(prompt, params, f"p{index}", lambda: None)
        start = time.perf_counter()
        while engine._running or engine._waiting:
            engine._step()
        print(f"{engine.steps} steps, {time.perf_counter() - start:.2f} s under the profiler")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    decoder = load_decoder(arguments.model)
    engine = EmbeddedEngine(decoder, arguments.model, kv_cache_gib=1.0, num_threads=arguments.threads)
    engine.start()
    model = None
    if not arguments.no_transformers:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    print(
        f"{arguments.model.name}, fp32, {arguments.threads} threads, prompt {arguments.prompt_tokens}, "
        f"{arguments.new_tokens} new tokens; decode tokens/s, best and median of {arguments.repeats}"
    )
    for batch in arguments.batches:
        prompts = make_prompts(batch, arguments.prompt_tokens, decoder.config.vocab_size)
        ours: list[tuple[float, float, float]] = []
        theirs: list[tuple[float, float, float]] = []
        for _ in range(arguments.repeats):
            engine.flush()
            for times, measure, what in ((ours, engine_seconds, engine), (theirs, transformers_seconds, model)):
                if what is not None:
                    cpu = time.process_time()
                    prefill, decode = measure(what, prompts, arguments.new_tokens)
                    times.append((prefill, decode, time.process_time() - cpu))
        for name, times in (("engine", ours), ("transformers", theirs)):
            if times:
                # The engine's rows start one after the other, so some tokens fall into its prefill time: it is judged
                # by what remains after the last row has begun.
                tokens = batch * (arguments.new_tokens - 1)
                total = batch * arguments.new_tokens
                decode = [tokens / d for _, d, _ in times]
                both = [total / (p + d) for p, d, _ in times]
                cpu_rate = max(total / c for _, _, c in times)
                print(
                    f"batch {batch:3d}  {name:13s} decode {max(decode):6.0f} {statistics.median(decode):6.0f}   "
                    f"with prefill {max(both):6.0f} {statistics.median(both):6.0f}   per CPU-second {cpu_rate:6.0f}",
                    flush=True,
                )
    if arguments.profile:
        profile(engine, make_prompts(32, arguments.prompt_tokens, decoder.config.vocab_size), 24)
    engine.close()


if __name__ == "__main__":
    main()
