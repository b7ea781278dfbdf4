"""What fp32 logits do to the mismatch of a real model in bf16: the embedded engine samples, the trainer looks again.

    python benchmarks/final_logits.py            # SmolLM2-135M from models/smollm2_135m, on the CPU: a minute

Four rows: engine and trainer with `model.fp32_logits` on and off. The last column takes the mean over positions of the
largest logit: bf16 rounds a value between 16 and 32 to steps of 0.125.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.sampling import SamplingParams
from rl360.models.decoder import Decoder
from rl360.models.loading import load_decoder
from rl360.trainers.attention import tree_attend
from rl360.trainers.logprobs import Predictions, token_logprobs
from rl360.trainers.mismatch import mismatch_means, mismatch_sums
from rl360.trainers.packing import pack
from rl360.types import Sequence

QUESTIONS = ("adds two numbers", "reverses a string", "sorts words by length", "counts vowels", "tests for a prime",
             "merges two lists", "finds the largest number", "parses a date")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2_135m"))
    parser.add_argument("--attempts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    decoder = load_decoder(asked.model, dtype=torch.bfloat16).requires_grad_(False)
    for engine_fp32 in (False, True):
        sequences = sampled(decoder, asked, engine_fp32)
        for trainer_fp32 in (False, True):
            row = {"engine": engine_fp32, "trainer": trainer_fp32, **compared(decoder, sequences, trainer_fp32)}
            print(json.dumps(row), flush=True)


def sampled(decoder: Decoder, asked: argparse.Namespace, fp32: bool) -> list[Sequence]:
    engine = EmbeddedEngine(decoder, asked.model, kv_cache_gib=0.5, num_threads=asked.threads, fp32_logits=fp32)
    engine.start()
    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    ended, requests = [], []
    for number, question in zip(range(asked.attempts), itertools.cycle(QUESTIONS), strict=False):
        chat = f"<|im_start|>user\nWrite a Python function that {question}.<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(chat, add_special_tokens=False).ids
        params = SamplingParams(max_new_tokens=asked.tokens, sampling_seed=number, ignore_eos=True)
        ended.append(threading.Event())
        requests.append(engine.submit(prompt, params, str(number), ended[-1].set))
    for event in ended:
        event.wait()
    engine.close()
    sequences = []
    for request in requests:
        ids = request.tokens[: request.length].astype(np.int32)
        mask = np.arange(ids.size) >= request.prompt_tokens
        behaviour = np.zeros(ids.size, np.float32)
        behaviour[mask] = request.logprobs
        ones = mask.astype(np.float32)
        weights = ones / (asked.attempts * asked.tokens)
        sequences.append(Sequence(ids, mask, behaviour, ones, weights, 1.0, request.rid, request.rid))
    return sequences


@torch.no_grad()
def compared(decoder: Decoder, sequences: list[Sequence], fp32: bool) -> dict[str, float]:
    totals: dict[str, float] = {}
    largest = []
    for micro in pack(sequences, 2048, True):
        ids, positions = torch.from_numpy(micro.token_ids_N), torch.from_numpy(micro.positions_N)
        hidden = decoder.hidden(ids, positions, tree_attend(micro.trees, decoder.dtype))[torch.from_numpy(micro.rows_U)]
        predictions = Predictions(*map(torch.from_numpy, (micro.temperatures_U, micro.slots_M, micro.targets_M)))
        logprobs = token_logprobs(hidden, decoder.head_weight, predictions, 256, fp32)
        rest = (torch.from_numpy(part) for part in (micro.behaviour_M, micro.weights_M, micro.places_M))
        for name, value in mismatch_sums(logprobs, *rest).items():
            known = totals.get(name, 0.0)
            totals[name] = max(known, float(value)) if name.endswith("_max") else known + float(value)
        largest.append(decoder.logits(hidden, fp32=True).amax(dim=-1))
    means = mismatch_means(totals)
    names = ("mismatch/logprob_diff_mean", "mismatch/logprob_diff_max", "mismatch/kl")
    found = {name: round(means[name], 6) for name in names}
    return found | {"largest_logit": round(float(torch.cat(largest).mean()), 2)}


if __name__ == "__main__":
    main()
