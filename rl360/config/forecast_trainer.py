"""What a trainer holds of a GPU that it shares with an engine: at its peak, between steps, and when it has left.

In: a typed config and a model's numbers. Out: `TrainerOnGpu`. Left to others: the bytes of Megatron's ranks
(rl360.trainers.megatron.memory), the engine's (rl360.config.forecast_engine), both together (forecast_sharing).

What leaves the GPU is what rl360.trainers.offload moves: weights and optimizer state, to pinned host memory. Gradients
are dropped. PyTorch rounds each pinned block up to a power of two (ATen/core/CachingHostAllocator.h), so the host holds
more than what left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rl360.config.forecast import (
    ACTIVATION_FFN_UNITS,
    ACTIVATION_HIDDEN_UNITS,
    BF16_BYTES,
    FP32_BYTES,
    MIB,
    ModelShape,
)
from rl360.config.gpu_memory import Setup
from rl360.config.schemas import MegatronTrainerConfig, RootConfig, TorchTrainerConfig
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.memory import CUBLAS_BYTES, CUDA_CONTEXT_BYTES, StageForecast

LEFT_BYTES = 64 * MIB  # tensors that stay: rotary tables, buffers, metrics
STATES = 3  # fp32 masters and Adam's two moments


@dataclass(frozen=True, slots=True)
class TrainerOnGpu:
    """Bytes of one GPU, with CUDA's context and NCCL's buffers in each, and what the host gets of it."""

    peak: int  # within a step; what the allocator has then it keeps until the trainer leaves
    resident: int  # between steps: weights, gradients, optimizer
    at_start: int  # before the first step: Adam has no moments yet
    left: int  # after the trainer has left
    host: int  # pinned memory of one rank when it has left
    host_exact: int  # of that what holds values; the rest is rounding


def trainer_gpus(config: RootConfig) -> int:
    """GPUs that the trainer takes, from the first on; 0: it is on a CPU, or not ours to know."""
    trainer = config.trainer
    if isinstance(trainer, MegatronTrainerConfig):
        return trainer.num_gpus if trainer.rank_target == MegatronTrainerConfig.rank_target else 0
    return 1 if isinstance(trainer, TorchTrainerConfig) and trainer.device != "cpu" else 0


def trainer_on_gpu(config: RootConfig, model: ModelShape, shared: Iterable[int]) -> TrainerOnGpu | None:
    """The fullest of the GPUs `shared`; None: the trainer has none of them.

    Raises `ConfigError` when Megatron's layout does not fit the model.
    """
    mine = sorted(set(shared) & set(range(trainer_gpus(config))))
    if not mine:
        return None
    if isinstance(config.trainer, MegatronTrainerConfig):
        setup = Setup.of(config, model)
        stages = setup.stages()
        per_stage = setup.layout.world_size // setup.layout.pipeline
        fullest = max((stages[gpu // per_stage] for gpu in mine), key=lambda stage: stage.total)
        return _of_stage(fullest, setup)
    return _of_torch(config, model)


def host_bytes(config: RootConfig, model: ModelShape) -> tuple[int, int]:
    """(bytes, of which values) that all ranks of a trainer that has left hold in the host's memory."""
    if isinstance(config.trainer, MegatronTrainerConfig):
        setup = Setup.of(config, model)
        per_stage = setup.layout.world_size // setup.layout.pipeline
        ranks = [_of_stage(stage, setup) for stage in setup.stages()]
        return per_stage * sum(rank.host for rank in ranks), per_stage * sum(rank.host_exact for rank in ranks)
    found = _of_torch(config, model)
    return found.host, found.host_exact


def pinned(count: int) -> int:
    """Bytes that PyTorch takes for a pinned block of `count`."""
    return 1 << max(0, count - 1).bit_length() if count else 0


def _of_stage(stage: StageForecast, setup: Setup) -> TrainerOnGpu:
    static, outside = sum(stage.static.values()), sum(stage.outside.values())
    layout = setup.layout
    shards = layout.data * layout.context
    moves = {name: count for name, count in stage.static.items() if name != "gradients"}
    # Weights are one buffer a model chunk; masters and moments are a rank's part of each weight.
    buffers = layout.chunks * pinned(-(-stage.static["weights"] // layout.chunks))
    reference = stage.static.get("reference", 0)
    states = STATES * sum(pinned(FP32_BYTES * n) for n in _joined_matrices(setup.model, layout, stage.pipeline_rank))
    return TrainerOnGpu(
        peak=stage.total,
        resident=static + outside + CUBLAS_BYTES,
        at_start=static + outside + CUBLAS_BYTES - stage.static["optimizer"] * (STATES - 1) // STATES,
        left=outside + CUBLAS_BYTES + LEFT_BYTES,
        host=max(sum(moves.values()), buffers + reference + -(-states // shards)),
        host_exact=sum(moves.values()),
    )


def _of_torch(config: RootConfig, model: ModelShape) -> TrainerOnGpu:
    """bf16 weights, fp32 masters, moments and gradients. The activations are an estimate."""
    trainer = config.trainer
    assert isinstance(trainer, TorchTrainerConfig)
    parameters = model.num_parameters
    reference = BF16_BYTES * parameters if config.algorithm.kl_coef > 0 else 0
    states = STATES * FP32_BYTES * parameters
    resident = BF16_BYTES * parameters + states + reference
    tokens = max(trainer.max_tokens_per_gpu, config.rollout.max_context_tokens)
    row = ACTIVATION_HIDDEN_UNITS * model.hidden_size + ACTIVATION_FFN_UNITS * model.intermediate_size
    layers = 1 if trainer.gradient_checkpointing else model.num_layers
    activations = BF16_BYTES * tokens * row * layers
    if trainer.gradient_checkpointing:
        activations += BF16_BYTES * tokens * model.hidden_size * model.num_layers
    logits = 2 * FP32_BYTES * min(trainer.logprob_chunk_tokens, tokens) * model.vocab_size
    outside = CUDA_CONTEXT_BYTES + CUBLAS_BYTES
    matrices = list(_matrices(model))
    weights = sum(pinned(BF16_BYTES * n) for n in matrices)
    masters = STATES * sum(pinned(FP32_BYTES * n) for n in matrices)
    return TrainerOnGpu(
        peak=resident + FP32_BYTES * parameters + activations + logits + outside,
        resident=resident + outside,
        at_start=resident + outside - states * (STATES - 1) // STATES,
        left=outside + LEFT_BYTES,
        host=max(resident, masters + weights * (2 if reference else 1)),
        host_exact=resident,
    )


def _matrices(model: ModelShape) -> Iterable[int]:
    """Values of each matrix under its HF name. Norms are too small to count."""
    h, heads, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for _ in range(model.num_layers):
        yield from (h * heads, h * kv, h * kv, heads * h, *(3 * [h * model.intermediate_size]))
    for _ in range(1 if model.tie_word_embeddings else 2):
        yield model.vocab_size * h


def _joined_matrices(model: ModelShape, layout: Layout, pipeline_rank: int) -> Iterable[int]:
    """Values of each matrix of a Megatron rank: q, k, v are one, and so are gate and up."""
    h, t = model.hidden_size, layout.tensor
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for _ in range(model.num_layers // layout.pipeline):
        for count in (h * (heads + 2 * kv), heads * h, 2 * h * model.intermediate_size, h * model.intermediate_size):
            yield count // t
    rows = layout.padded_vocab(model.vocab_size) // t
    first, last = pipeline_rank == 0, pipeline_rank == layout.pipeline - 1
    copies = int(first) + int(last and not (first and model.tie_word_embeddings))
    for _ in range(copies):
        yield rows * h
