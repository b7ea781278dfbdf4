"""Checkpoints of trainer=megatron on this machine: how long training waits, how long files take, and are they right.

    python benchmarks/megatron_checkpoint.py --layers 8 --num-gpus 2 --save tensor_parallel_size=2 --restore num_gpus=2

Random weights of Qwen3-8B's shapes, two steps under the layout --save, a save, a save while the next step runs, then a
trainer of the layout --restore that takes it over and saves again. Prints one JSON object: seconds, GB, and whether
every tensor came back to the last bit; --json has it after every stage. The page cache counts: files are synced, reads
may come from memory. Steps are not compiled, which would take longer than all the files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from train_step import QWEN3_8B  # noqa: E402

from benchmarks.progress import Progress, end_on_sigterm, show_logs  # noqa: E402
from rl360.algorithms.grpo import GRPO  # noqa: E402
from rl360.models.decoder import Decoder, DecoderConfig  # noqa: E402
from rl360.models.megatron.convert import weights_folder  # noqa: E402
from rl360.models.megatron.torch_dist import Reader  # noqa: E402
from rl360.trainers.megatron.trainer import MegatronTrainer  # noqa: E402
from rl360.types import Batch, Sequence  # noqa: E402

BYTES_A_PARAMETER = 16  # on the disk, at most: weights in up to 4 bytes, masters and two moments in 4 each
COPIES = 2  # there at the same time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--config", type=json.loads, default={}, help="further keys of config.json")
    parser.add_argument("--tokens", type=int, default=8192, help="of the one sequence of a data-parallel rank's step")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--save", nargs="*", default=[], help="KEY=NUMBER of the trainer that saves")
    parser.add_argument("--restore", nargs="*", default=[], help="KEY=NUMBER of the trainer that restores")
    parser.add_argument("--folder", type=Path, help="where files go; default: a temporary folder")
    parser.add_argument("--rank-target", default="rl360.trainers.megatron.rank:MegatronRank")
    parser.add_argument("--json", type=Path, help="written after every stage")
    args = parser.parse_args()
    found: dict[str, Any] = {"layers": args.layers, "config": args.config, "save": args.save, "restore": args.restore}
    progress = Progress(found, args.json)
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="rl360-checkpoint-", dir=args.folder) as scratch:
            try:
                measure(args, Path(scratch), progress)
            except BaseException:
                show_logs(Path(scratch) / "logs")
                raise
    finally:
        print(json.dumps(found, indent=1), flush=True)


def measure(args: argparse.Namespace, scratch: Path, progress: Progress) -> None:
    found = progress.found
    model = scratch / "model"
    model.mkdir()
    config = {**QWEN3_8B, "num_hidden_layers": args.layers, **args.config}
    (model / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Decoder(DecoderConfig.from_hf(config)).parameters())
    needed, free = COPIES * BYTES_A_PARAMETER * count, shutil.disk_usage(scratch).free
    progress.say(
        f"{count / 1e9:.2f} billion parameters, up to {needed / 1e9:.1f} GB of files; {free / 1e9:.0f} GB free"
    )
    if free < needed:
        sys.exit(f"megatron_checkpoint.py: {scratch} has too little room; try fewer --layers, or another --folder")

    def trainer(settings: list[str], seed: int) -> MegatronTrainer:
        numbers = {key: int(value) for key, value in (one.split("=") for one in settings)}
        made = MegatronTrainer(
            **{"learning_rate": 1e-5, "num_gpus": args.num_gpus, "max_tokens_per_gpu": args.tokens, **numbers},
            compile=False,
            model_dir=model,
            random_init_seed=seed,
            algorithm=GRPO(),
            log_dir=scratch / "logs",
            rank_target=args.rank_target,
        )
        made.start()
        return made

    def timed(name: str, function: Any, *arguments: Any) -> Any:
        with progress.stage(name):
            return function(*arguments)

    saving = timed("start", trainer, args.save, 1)
    try:
        batch = random_batch(args.tokens, saving.layout.data, config["vocab_size"])
        timed("first_step", saving.step, batch)
        timed("step", saving.step, batch)
        timed("save", saving.save, scratch / "saved")
        pending = timed("begin_save", saving.begin_save, scratch / "meanwhile")
        timed("step_while_writing", saving.step, batch)
        timed("wait_after_it", pending.wait)
    finally:
        saving.close()
    found["gb"] = round(sum(f.stat().st_size for f in (scratch / "saved").rglob("*") if f.is_file()) / 1e9, 3)
    found["meanwhile_is_equal"] = timed("compare_meanwhile", same, scratch / "saved", scratch / "meanwhile")
    shutil.rmtree(scratch / "meanwhile")
    restoring = timed("start_again", trainer, args.restore, 2)
    try:
        timed("restore", restoring.restore, scratch / "saved")
        timed("save_again", restoring.save, scratch / "again")
        batch = random_batch(args.tokens, restoring.layout.data, config["vocab_size"])
        found["grad_norm_after_restore"] = timed("step_again", restoring.step, batch).metrics["train/grad_norm"]
    finally:
        restoring.close()
    found["restored_is_equal"] = timed("compare_again", same, scratch / "saved", scratch / "again")
    progress.write()


def random_batch(tokens: int, ranks: int, vocabulary: int) -> Batch:
    generator = np.random.default_rng(0)
    mask = np.arange(tokens) >= tokens // 8
    sequences = [
        Sequence(
            token_ids_T=generator.integers(vocabulary, size=tokens).astype(np.int32),
            loss_mask_T=mask,
            behaviour_logprobs_T=np.where(mask, np.float32(-10), np.float32(0)),
            advantages_T=np.where(mask, np.float32(1), np.float32(0)),
            weights_T=np.where(mask, np.float32(1 / (ranks * mask.sum())), np.float32(0)),
            temperature=1.0,
            group_id=f"g{rank}",
            attempt_id=f"g{rank}/a",
        )
        for rank in range(ranks)
    ]
    return Batch(tuple(sequences), num_trained_tokens=int(ranks * mask.sum()), num_sequences=ranks)


def same(folder: Path, other: Path) -> bool:
    left, right = Reader(weights_folder(folder)), Reader(weights_folder(other))
    for name in left.names():
        shape = left.shape(name)
        layers = range(shape[0]) if name.count("decoder.layers") else [None]  # a layer at a time: stacks are large
        for layer in layers:
            at = (0,) * len(shape) if layer is None else (layer, *(0,) * (len(shape) - 1))
            size = shape if layer is None else (1, *shape[1:])
            if not torch.equal(left.read(name, at, size), right.read(name, at, size)):
                return False
    return set(left.names()) == set(right.names())


if __name__ == "__main__":
    main()
