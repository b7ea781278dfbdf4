"""model.fp32_logits on both sides: the embedded engine samples, the torch trainer computes again, both in bf16."""

from __future__ import annotations

import threading

import numpy as np
import torch

from rl360.algorithms.grpo import GRPO
from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.sampling import SamplingParams
from rl360.models.loading import load_decoder
from rl360.trainers.torch_trainer import TorchTrainer
from rl360.types import Batch, Sequence
from tests.trainers.helpers import VOCAB, batch_of, tiny_folder

NUM_REQUESTS, NUM_TOKENS = 16, 20


def make_trainer(folder, fp32_logits: bool) -> TorchTrainer:
    """In bf16, with logits of the size of a trained model's, some tens: what all tokens share does not matter to the
    softmax, but to their rounding."""

    def load(*args, **kwargs):
        decoder = load_decoder(*args, **kwargs | {"dtype": torch.bfloat16})
        with torch.no_grad():
            decoder.lm_head.weight.mul_(4)
            decoder.lm_head.weight[:, 0] = 40
        return decoder

    trainer = TorchTrainer(
        0.0, num_threads=1, device="cpu", model_dir=folder, random_init_seed=3, algorithm=GRPO(), load_decoder=load,
        fp32_logits=fp32_logits,
    )  # fmt: skip
    trainer.start()
    return trainer


def sample(trainer: TorchTrainer, fp32_logits: bool) -> Batch:
    engine = EmbeddedEngine(trainer.decoder, None, kv_cache_gib=0.01, num_threads=1, fp32_logits=fp32_logits)
    engine.start()
    draw = np.random.default_rng(0)
    requests, ends = [], []
    for number in range(NUM_REQUESTS):
        params = SamplingParams(max_new_tokens=NUM_TOKENS, sampling_seed=number, ignore_eos=True)
        ends.append(threading.Event())
        prompt = draw.integers(3, VOCAB, size=6).tolist()
        requests.append(engine.submit(prompt, params, str(number), ends[-1].set))
    assert all(end.wait(60) for end in ends)
    engine.close()
    sequences = []
    for request in requests:
        ids = request.tokens[: request.length].astype(np.int32)
        mask = np.arange(ids.size) >= request.prompt_tokens
        behaviour = np.zeros(ids.size, np.float32)
        behaviour[mask] = request.logprobs
        ones = mask.astype(np.float32)
        weights = ones / (NUM_REQUESTS * NUM_TOKENS)
        sequences.append(Sequence(ids, mask, behaviour, ones, weights, 1.0, request.rid, request.rid))
    return batch_of(sequences)


def test_with_fp32_logits_on_both_sides_engine_and_trainer_are_nearer(tmp_path):
    folder = tiny_folder(tmp_path / "model", tie_word_embeddings=False, num_hidden_layers=2)
    found = {}
    for engine_fp32 in (True, False):
        for trainer_fp32 in (True, False):
            trainer = make_trainer(folder, trainer_fp32)
            found[engine_fp32, trainer_fp32] = trainer.step(sample(trainer, engine_fp32)).metrics
    kl = {sides: metrics["mismatch/kl"] for sides, metrics in found.items()}
    assert kl[True, True] < 0.5 * kl[False, False], kl
    assert kl[True, True] < min(kl[True, False], kl[False, True]), kl  # one side alone is not enough
