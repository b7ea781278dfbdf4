"""One GRPO train step of trainer=megatron on a GPU: tokens/s, peak memory, MFU, and the share of the card's roofline.

    python benchmarks/train_step.py --layers 20 --cases 8192x1 8192x8 --json out.json
    python benchmarks/train_step.py --num-gpus 2 --tensor-parallel 2 --cases 8192x4 4096+2048+2048x4
    python benchmarks/train_step.py --layers 12 --one-of-context 4 --cases 131072x1

Random weights of Qwen3-8B's shapes (or --config of another model), random tokens, real AdamW steps. Ranks run as
they do in a run: processes of a `WorkerGroup`. A case is the sequences of one micro-batch, joined by `+`, and after the
`x` how many micro-batches a data-parallel rank computes in one step; every case is a step of its own kind, timed from
the driver's call to its answer, optimizer included.

`--one-of-context N` runs on one GPU what the last of N context ranks computes: its 1/N of the queries against the keys
of the whole stream, kept as that rank keeps them. The exchange is a copy inside the card's memory (every rank's part is
taken to be its own), so no time on a network is in it; the optimizer holds everything, which N ranks would share. Rates
and FLOPs are 1/N of the whole's, and so is the roofline; this rank may predict a little more of it than that, because
the first ones have the prompt.

The roofline is measured on the same card just after: the products of every linear layer (forward, gradient of the
input, gradient of the weight added in fp32), of the head, and the attention kernel, forward and backward, each at the
shape that the step uses and timed alone. Their sum is the least time of the step on this card; nothing else of the step
(norms, rotary embedding, SwiGLU, softmax of the head, optimizer) is in it. `--roofline-of FILE` takes it from a result
for the same shape, layout and cases. Stages and their seconds go to stderr, and --json is written after each of them.

MFU counts: 6 FLOPs a matrix parameter and token (embedding excluded; the head only for positions that predict a
trained token), attention at half of the full square, 3.5 times 4 x pairs x heads x head width for forward and backward
together is what a kernel does with its recomputation; counted here is the model's own 3 times. Peak: 989 TFLOP/s, one
H100 or H200 SXM, bf16 without sparsity (NVIDIA's data sheet).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.progress import Progress, end_on_sigterm, show_logs  # noqa: E402
from benchmarks.train_step_ranks import ONE_OF_CONTEXT, BenchmarkRank  # noqa: E402
from rl360.algorithms.grpo import GRPO  # noqa: E402
from rl360.engine.workers import LocalWorkerGroup  # noqa: E402
from rl360.models.decoder import DecoderConfig  # noqa: E402
from rl360.types import Batch  # noqa: E402
from rl360.types import Sequence as TokenSequence  # noqa: E402

PEAK_FLOPS = 989e12
# What a roofline depends on beside the layers and the cases.
OF_ROOFLINE = ("config", "tensor_parallel", "context_parallel", "one_of_context", "logprob_chunk", "prompt_share")
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
}


def main() -> None:
    args = parse()
    import torch

    if not torch.cuda.is_available():
        sys.exit("train_step.py: no CUDA GPU on this machine; it times a GPU's kernels and steps")
    sys.path.insert(0, str(Path(__file__).parent))  # for the workers, which import this file
    config = QWEN3_8B if args.config is None else json.loads(args.config.read_text())
    config = {**config, "num_hidden_layers": args.layers or config["num_hidden_layers"]}
    shape = DecoderConfig.from_hf(config)
    with tempfile.TemporaryDirectory(prefix="rl360-train-step-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        found: dict[str, Any] = {
            "arguments": {k: str(v) for k, v in vars(args).items() if k != "json"}
            | {"cases": " ".join(case.name for case in args.cases)},
            "layers": shape.num_layers,
            "model": config,
            "fp32_logits": args.trainer.get("fp32_logits", True),  # files without it are older, and of false
            "roofline_ms": {} if args.roofline_of is None else taken_rooflines(shape, args),
            "cases": {},
        }
        progress = Progress(found, args.json)
        end_on_sigterm()
        measure_steps(shape, args, folder, Path(scratch), progress)
        if not args.no_roofline and args.roofline_of is None:
            measure_rooflines(shape, args, Path(scratch), progress)
    for case in args.cases:
        print(case.name, summary(found["cases"][case.name]), flush=True)


def summary(figures: dict[str, Any]) -> str:
    names = (
        "step_s",
        "tokens_per_s",
        "model_tflops_per_gpu",
        "mfu",
        "share_of_roofline",
        "share_of_sustained_roofline",
        "peak_memory_gib",
    )
    return " ".join(f"{name}={figures[name]:.4g}" for name in names if name in figures)


def taken_rooflines(shape: DecoderConfig, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The ones of another result. Ends the program when that one had another shape or layout, or lacks a case."""
    other = json.loads(args.roofline_of.read_text())
    asked = {"layers": shape.num_layers} | {key: str(getattr(args, key)) for key in OF_ROOFLINE}
    there = {"layers": other["layers"]} | {key: other["arguments"].get(key) for key in OF_ROOFLINE}
    if asked != there or any(case.name not in other["roofline_ms"] for case in args.cases):
        sys.exit(f"train_step.py: {args.roofline_of}: a roofline of {there}, expected {asked} with every case")
    return {case.name: other["roofline_ms"][case.name] for case in args.cases}


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]  # of one micro-batch
    micro_batches: int  # of one step and data-parallel rank

    @classmethod
    def of(cls, text: str) -> Case:
        lengths, _, count = text.partition("x")
        return cls(text, tuple(int(n) for n in lengths.split("+")), int(count or 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="config.json of another model")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--cases", type=Case.of, nargs="+", default=[Case.of("8192x1")], help="see above")
    parser.add_argument("--prompt-share", type=float, default=0.125, help="of each sequence that is not trained on")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--one-of-context", type=int, default=1, help="one GPU, the part of one of so many; see above")
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--recompute", default="none", choices=["none", "core_attn", "full"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--transformer-engine", action="store_true", help="layers of Transformer Engine's modules")
    parser.add_argument("--logprob-chunk", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-roofline", action="store_true")
    parser.add_argument("--roofline-of", type=Path, help="JSON of another run whose roofline is taken")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels that took longest in each case's last step"
    )
    parser.add_argument("--trainer", type=json.loads, default={}, help="further keys of the trainer, as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.one_of_context > 1 and args.num_gpus > 1:
        parser.error("--one-of-context stands for ranks that are not there: it takes --num-gpus 1")
    args.data_parallel = args.num_gpus // (args.tensor_parallel * args.context_parallel * args.pipeline_parallel)
    return args


# ---- the steps


def measure_steps(
    shape: DecoderConfig, args: argparse.Namespace, folder: Path, scratch: Path, progress: Progress
) -> None:
    from rl360.trainers.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(
        learning_rate=1e-6,
        logprob_chunk_tokens=args.logprob_chunk,
        num_gpus=args.num_gpus,
        tensor_parallel_size=args.tensor_parallel,
        context_parallel_size=args.context_parallel,
        pipeline_parallel_size=args.pipeline_parallel,
        recompute=args.recompute,
        compile=not args.no_compile,
        transformer_engine=args.transformer_engine,
        rank_target=f"train_step_ranks:{rank_class(args)}",
        model_dir=folder,
        random_init_seed=0,
        algorithm=GRPO(),
        log_dir=scratch / "logs",
        **args.trainer,
    )
    found = progress.found
    try:
        with progress.stage("trainer start"):
            trainer.start()
        for line in (scratch / "logs" / "trainer-0.log").read_text().splitlines():
            if line.startswith(BenchmarkRank.SAYS):
                progress.say(line)
        for case in args.cases:
            with progress.stage(f"{case.name} steps"):
                trainer._max_tokens = -(-sum(case.lengths) // args.context_parallel)  # micro-batches as the case says
                rows = []
                for number in range(args.warmup + args.steps):
                    rows.append(dict(trainer.step(random_batch(shape, args, case, seed=number)).metrics))
                    progress.say(f"{case.name} step {number}: {rows[-1]['time/train_s']:.3f} s")
                    if number >= args.warmup:
                        counted = rows[args.warmup :]
                        figures = {"step_s": statistics.median(r["time/train_s"] for r in counted), "metrics": counted}
                        figures |= derived(shape, args, case, figures, found["roofline_ms"].get(case.name))
                        found["cases"][case.name] = figures
            progress.say(f"{case.name} {summary(found['cases'][case.name])}")
            if args.profile:
                for text in trainer._call("profiled", [(case.name,)] * args.num_gpus, 60.0)[:1]:
                    print(text, flush=True)
    except BaseException:
        show_logs(scratch / "logs")
        raise
    finally:
        trainer.close()


def rank_class(args: argparse.Namespace) -> str:
    if args.one_of_context > 1:
        os.environ[ONE_OF_CONTEXT] = str(args.one_of_context)
        return "ContextRank"
    return "ProfiledRank" if args.profile else "BenchmarkRank"


def random_batch(shape: DecoderConfig, args: argparse.Namespace, case: Case, seed: int) -> Batch:
    """`micro_batches` x data ranks x lengths sequences; behaviour logprobs are those of a uniform policy."""
    draw = np.random.default_rng(seed)
    lengths = [n for _ in range(case.micro_batches * args.data_parallel) for n in case.lengths]
    trained = [n - max(1, int(n * args.prompt_share)) for n in lengths]
    sequences = []
    for number, (length, count) in enumerate(zip(lengths, trained, strict=True)):
        mask = np.arange(length) >= length - count
        sequences.append(
            TokenSequence(
                token_ids_T=draw.integers(0, shape.vocab_size, length, dtype=np.int32),
                loss_mask_T=mask,
                behaviour_logprobs_T=np.where(mask, -np.log(shape.vocab_size), 0.0).astype(np.float32),
                advantages_T=np.full(length, draw.normal(), dtype=np.float32),
                weights_T=np.where(mask, 1.0 / sum(trained), 0.0).astype(np.float32),
                temperature=1.0,
                group_id=f"g{number}",
                attempt_id=f"a{number}",
            )
        )
    return Batch(tuple(sequences), sum(trained), len(sequences))


# ---- the roofline


def measure_rooflines(shape: DecoderConfig, args: argparse.Namespace, scratch: Path, progress: Progress) -> None:
    group = LocalWorkerGroup(
        "roofline:Roofline",
        1,
        {"shape": shape, "args": argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "cases"})},
        name="roofline",
        log_dir=scratch / "logs",
    )
    found = progress.found
    try:
        group.start()
        known: dict[tuple[int, ...], dict[str, float]] = {}  # cases of the same lengths have the same kernels
        for case in args.cases:
            parts = known.setdefault(case.lengths, {})
            if not parts:
                for part in ("products", "attention"):
                    with progress.stage(f"{case.name} roofline of {part}"):
                        parts |= asyncio.run(group.call(0, part, case.lengths, timeout_s=300))
                for prefix in ("", "sustained_"):
                    parts[f"{prefix}total"] = parts[f"{prefix}products"] + parts[f"{prefix}attention"]
            found["roofline_ms"][case.name] = parts
            figures = found["cases"][case.name]
            figures |= derived(shape, args, case, figures, parts)
            progress.write()
    finally:
        group.close()


# ---- what follows from both


def model_flops(shape: DecoderConfig, lengths: Sequence[int], prompt_share: float) -> float:
    """FLOPs of forward and backward over these sequences, as the module's first page counts them."""
    hidden, width = shape.hidden_size, shape.head_dim
    layer = hidden * width * (2 * shape.num_heads + 2 * shape.num_kv_heads) + 3 * hidden * shape.intermediate_size
    predicting = sum(n - max(1, int(n * prompt_share)) for n in lengths)
    products = 6 * (layer * shape.num_layers * sum(lengths) + hidden * shape.vocab_size * predicting)
    attention = sum(3 * 4 * n * n / 2 * shape.num_heads * width for n in lengths) * shape.num_layers
    return products + attention


def derived(
    shape: DecoderConfig,
    args: argparse.Namespace,
    case: Case,
    figures: dict[str, Any],
    roofline: dict[str, float] | None,
) -> dict[str, Any]:
    replicas = case.micro_batches * args.data_parallel / args.one_of_context
    flops = model_flops(shape, case.lengths, args.prompt_share) * replicas
    step_s = figures["step_s"]
    result: dict[str, Any] = {
        "tokens_per_s": sum(case.lengths) * replicas / step_s,
        "model_tflops_per_gpu": flops / step_s / args.num_gpus / 1e12,
        "mfu": flops / step_s / args.num_gpus / PEAK_FLOPS,
    }
    peaks = [row["perf/peak_memory_gib_max"] for row in figures["metrics"] if "perf/peak_memory_gib_max" in row]
    if peaks:
        result["peak_memory_gib"] = max(peaks)
    if roofline is not None:
        # A stage has its part of the layers; the first and the last are taken to share the head evenly with the others.
        for total, share in (("total", "share_of_roofline"), ("sustained_total", "share_of_sustained_roofline")):
            if total in roofline:
                of_stage_ms = roofline[total] / args.pipeline_parallel
                result[share] = of_stage_ms * case.micro_batches / 1e3 / step_s
    return result


if __name__ == "__main__":
    main()
