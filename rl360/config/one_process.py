"""What trainer=torch and the embedded engine need of the machine and of the model, before either is loaded.

In: a typed config, the model's numbers, and how many CUDA GPUs there are. Out: problems as `key: what; expected; try`.
Left to others: bytes of the whole run (forecast), Megatron's ranks and servers (files).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rl360.config.forecast import BF16_BYTES, FP32_BYTES, GIB, ModelShape
from rl360.config.schemas import ClusterConfig, RootConfig, TorchTrainerConfig

WIDTH_STEP = 64  # tokens by which a row of the embedded engine's KV cache grows: rl360.gateway.embedded.kv_cache


def one_process_problems(config: RootConfig, model: ModelShape | None, num_cards: Callable[[], int]) -> Iterator[str]:
    """Whether its device is there, and whether one attempt fits the KV cache and the model's positions.

    model: None: unknown. num_cards: asked only where it matters. The engine ends a turn where its room does, so
    attempts would be cut shorter than the config says, without a word.
    """
    trainer = config.trainer
    here = config.cluster._target_ == ClusterConfig._target_
    if not here or not isinstance(trainer, TorchTrainerConfig) or trainer._target_ != TorchTrainerConfig._target_:
        return
    cards = num_cards() if trainer.device != "cpu" else 0
    if trainer.device == "cuda" and not cards:
        yield "trainer.device: cuda, and this machine has no CUDA GPU; try auto or cpu"
    if config.rollout.engine == "embedded" and model is not None:
        yield from _room(config, model, BF16_BYTES if cards else FP32_BYTES)


def _room(config: RootConfig, model: ModelShape, number_bytes: int) -> Iterator[str]:
    tokens = config.rollout.max_context_tokens
    if model.max_positions is not None and tokens > model.max_positions:
        yield (
            f"rollout.max_context_tokens: {tokens} is more than the model's {model.max_positions} positions "
            "(max_position_embeddings), where the engine ends every turn; expected at most that"
        )
    token_bytes = model.kv_bytes_per_token * number_bytes // FP32_BYTES
    room = int(config.rollout.kv_cache_gib * GIB) // token_bytes // WIDTH_STEP * WIDTH_STEP
    if room < tokens:
        needed = math.ceil(tokens / WIDTH_STEP) * WIDTH_STEP * token_bytes / GIB
        least = max(math.ceil(needed * 1000) / 1000, 0.001)
        yield (
            f"rollout.kv_cache_gib: {config.rollout.kv_cache_gib:g} holds {room} tokens of this model, and one attempt "
            f"may have {tokens} (rollout.max_context_tokens); expected at least {least:g}"
        )
