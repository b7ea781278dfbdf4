"""One optimizer step on the CPU: our trainer with and without shared prompts, and transformers with torch's AdamW.

In: --model, an HF folder (left out: random weights of SmolLM2-135M's shape). Out: a table of tokens/s (prompt and
completion of every sequence, shared or not), seconds and CPU-seconds a step, and ratios; all on the same batch, threads
and machine, the three taking turns. The plain one is what a user would write first: padded micro-batches of the same
token budget, all logits, log_softmax, backward, clip, AdamW.

    python benchmarks/train_cpu.py --model models/smollm2_135m
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rl360.algorithms.grpo import GRPO
from rl360.trainers.torch_trainer import TorchTrainer
from rl360.types import Batch, Sequence

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
LEARNING_RATE = 1e-6  # small: the step must cost what it costs, and not change the policy between the three


def make_batch(groups: int, members: int, prompt: int, completion: int, seed: int) -> Batch:
    """Prompts of about the given length; completions between half and one and a half times theirs, none alike."""
    draw = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        head = draw.integers(100, 40_000, size=prompt + int(draw.integers(-8, 9)))
        for member in range(members):
            own = draw.integers(100, 40_000, size=int(draw.integers(completion // 2, completion * 3 // 2)))
            rows.append((f"g{group}", f"g{group}-{member}", head, own, float(draw.normal())))
    trained = sum(own.size for _, _, _, own, _ in rows)
    sequences = []
    for group_id, attempt_id, head, own, advantage in rows:
        mask = np.arange(head.size + own.size) >= head.size
        sequences.append(
            Sequence(
                token_ids_T=np.concatenate((head, own)).astype(np.int32),
                loss_mask_T=mask,
                behaviour_logprobs_T=np.where(mask, np.float32(-10.8), np.float32(0)),
                advantages_T=np.where(mask, np.float32(advantage), np.float32(0)),
                weights_T=np.where(mask, np.float32(1 / trained), np.float32(0)),
                temperature=1.0,
                group_id=group_id,
                attempt_id=attempt_id,
            )
        )
    return Batch(tuple(sequences), trained, len(sequences))


def ours(folder: Path, seed: int | None, args: argparse.Namespace, share: bool) -> Callable[[Batch], None]:
    trainer = TorchTrainer(
        LEARNING_RATE,
        max_tokens_per_gpu=args.tokens,
        logprob_chunk_tokens=args.chunk,
        share_prompts=share,
        device="cpu",
        num_threads=args.threads,
        model_dir=folder,
        random_init_seed=seed,
        algorithm=GRPO(),
    )
    trainer.start()

    def step(batch: Batch) -> None:
        trainer.step(batch)

    return step


def plain(folder: Path, seed: int | None, args: argparse.Namespace) -> Callable[[Batch], None]:
    from transformers import AutoConfig, AutoModelForCausalLM

    if seed is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)

    def step(batch: Batch) -> None:
        rows = sorted(batch.sequences, key=lambda s: s.token_ids_T.size)
        while rows:
            count = max(1, min(len(rows), args.tokens // rows[-1].token_ids_T.size))
            part, rows = rows[-count:], rows[:-count]
            width = part[-1].token_ids_T.size
            ids, mask, advantages, weights, behaviour, present = (
                torch.from_numpy(np.stack([np.pad(field(s), (0, width - s.token_ids_T.size)) for s in part]))
                for field in (
                    lambda s: s.token_ids_T.astype(np.int64),
                    lambda s: s.loss_mask_T,
                    lambda s: s.advantages_T,
                    lambda s: s.weights_T,
                    lambda s: s.behaviour_logprobs_T,
                    lambda s: np.ones(s.token_ids_T.size, dtype=np.int64),
                )
            )
            logits = model(ids, attention_mask=present, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = torch.exp(logprobs - logprobs.detach())
            correction = torch.exp(logprobs.detach() - behaviour[:, 1:]).clamp(max=2.0)
            token_losses = -correction * ratio * advantages[:, 1:] * weights[:, 1:]
            token_losses[mask[:, 1:]].sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--completion", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1024, help="token budget of a micro-batch")
    parser.add_argument("--chunk", type=int, default=256, help="rows of [tokens, vocabulary] held at once")
    parser.add_argument("--only", choices=("shared", "unshared", "plain"), help="run one of the three")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder, seed = args.model, None
        if folder is None:
            folder, seed = Path(scratch), 0
            (folder / "config.json").write_text(json.dumps(SMOLLM2))
        makers: dict[str, Callable[[], Callable[[Batch], None]]] = {
            "shared": lambda: ours(folder, seed, args, share=True),
            "unshared": lambda: ours(folder, seed, args, share=False),
            "plain": lambda: plain(folder, seed, args),
        }
        steps = {name: make() for name, make in makers.items() if args.only in (None, name)}
    batch = make_batch(args.groups, args.members, args.prompt, args.completion, seed=0)
    num_tokens = sum(s.token_ids_T.size for s in batch.sequences)
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(args.repeats + 1):  # the first makes moments and warms allocators up
        for name, step in steps.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            step(batch)
            if repeat:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - began_cpu)
    print(f"{len(batch.sequences)} sequences, {num_tokens} tokens, {batch.num_trained_tokens} trained", end="; ")
    print(f"{args.threads} threads, median of {args.repeats}")
    for name in steps:
        seconds, cpu_seconds = statistics.median(wall[name]), statistics.median(cpu[name])
        ratios = ""
        if "plain" in steps:
            by_wall = statistics.median(wall["plain"]) / seconds
            by_cpu = statistics.median(cpu["plain"]) / cpu_seconds
            ratios = f"{by_wall:5.2f}x plain's tokens/s {by_cpu:5.2f}x by CPU-s"
        print(
            f"{name:9} {num_tokens / seconds:6.0f} tokens/s {seconds:6.2f} s {cpu_seconds:6.2f} CPU-s a step {ratios}"
        )
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # ru_maxrss is in KiB on Linux
    print(f"peak memory of this process {peak_gib:.2f} GiB (run with --only to see one of them)")


if __name__ == "__main__":
    main()
