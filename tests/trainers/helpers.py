"""Tiny models and batches of the trainer's tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from rl360.models.decoder import Decoder
from rl360.types import Batch, Sequence

VOCAB = 97
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def sequence(
    prompt: list[int],
    completion: list[int],
    *,
    advantage: float = 1.0,
    weight: float = 0.01,
    group: str = "g",
    attempt: str = "a",
    temperature: float = 1.0,
    behaviour: float = -3.0,
) -> Sequence:
    """One prompt, then sampled tokens only."""
    ids = np.array(prompt + completion, dtype=np.int32)
    mask = np.arange(ids.size) >= len(prompt)
    return Sequence(
        token_ids_T=ids,
        loss_mask_T=mask,
        behaviour_logprobs_T=np.where(mask, np.float32(behaviour), np.float32(0)),
        advantages_T=np.where(mask, np.float32(advantage), np.float32(0)),
        weights_T=np.where(mask, np.float32(weight), np.float32(0)),
        temperature=temperature,
        group_id=group,
        attempt_id=attempt,
    )


def batch_of(sequences: list[Sequence]) -> Batch:
    return Batch(tuple(sequences), sum(int(s.loss_mask_T.sum()) for s in sequences), len(sequences))


def random_batch(seed: int, groups: int = 3, members: int = 4, prompt: int = 12, completion: int = 10) -> Batch:
    """Groups with a prompt of their own; completions of any length, some with a tool reply between sampled tokens, one
    repeated exactly; several temperatures; behaviour logprobs around the uniform one.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        head = draw.integers(3, VOCAB, size=prompt + group)
        last: tuple[np.ndarray, np.ndarray] | None = None
        for member in range(members):
            own = draw.integers(3, VOCAB, size=int(draw.integers(1, completion + 1)))
            mask = np.concatenate([np.zeros(head.size, bool), np.ones(own.size, bool)])
            if own.size > 4 and member % 2:
                mask[head.size + 1 : head.size + 3] = False
            ids = np.concatenate([head, own])
            if member == members - 1 and last is not None:
                ids, mask = last
            last = (ids, mask)
            rows.append((ids, mask, f"g{group}", f"g{group}-{member}", 1.0 if group else 0.7))
    total = sum(int(mask.sum()) for _, mask, *_ in rows)
    return batch_of(
        [
            Sequence(
                token_ids_T=ids.astype(np.int32),
                loss_mask_T=mask,
                behaviour_logprobs_T=np.where(mask, draw.normal(-4.5, 0.5, ids.size), 0).astype(np.float32),
                advantages_T=np.where(mask, draw.normal(), 0).astype(np.float32),
                weights_T=np.where(mask, 1 / total, 0).astype(np.float32),
                temperature=temperature,
                group_id=group,
                attempt_id=attempt,
            )
            for ids, mask, group, attempt, temperature in rows
        ]
    )


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
