"""What a trainer holds of a GPU that it shares with an engine: at its peak, between steps, and when it has left.

In: a typed config and a model's numbers. Out: `TrainerOnGpu`. Left to others: the bytes of Megatron's ranks
(rl360.trainers.megatron.memory), the engine's (rl360.config.forecast_engine), both together (forecast_sharing).

What leaves the GPU is what rl360.trainers.offload moves: weights and optimizer state, to as much host memory. Gradients
are dropped.
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
from rl360.trainers.megatron.memory import CUBLAS_BYTES, CUDA_CONTEXT_BYTES, StageForecast

LEFT_BYTES = 64 * MIB  # tensors that stay: rotary tables, buffers, metrics
STATES = 3  # fp32 masters and Adam's two moments


@dataclass(frozen=True, slots=True)
class TrainerOnGpu:
    """Bytes of one GPU, with CUDA's context and NCCL's buffers in each, and what the host gets of it."""

    peak: int  # within a step; the allocator keeps what it has then, until the trainer gives it back or leaves
    resident: int  # between steps: weights, gradients, optimizer
    at_start: int  # before the first step: Adam has no moments yet
    left: int  # after the trainer has left
    host: int  # memory of the host, for one rank that has left


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
        return _of_stage(fullest)
    return _of_torch(config, model)


def host_bytes(config: RootConfig, model: ModelShape) -> int:
    """Bytes of the host's memory that all ranks of a trainer that has left hold."""
    if isinstance(config.trainer, MegatronTrainerConfig):
        setup = Setup.of(config, model)
        per_stage = setup.layout.world_size // setup.layout.pipeline
        return per_stage * sum(_of_stage(stage).host for stage in setup.stages())
    return _of_torch(config, model).host


def _of_stage(stage: StageForecast) -> TrainerOnGpu:
    static, outside = sum(stage.static.values()), sum(stage.outside.values())
    return TrainerOnGpu(
        peak=stage.total,
        resident=static + outside + CUBLAS_BYTES,
        at_start=static + outside + CUBLAS_BYTES - stage.static["optimizer"] * (STATES - 1) // STATES,
        left=outside + CUBLAS_BYTES + LEFT_BYTES,
        host=static - stage.static["gradients"],
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
    return TrainerOnGpu(
        peak=resident + FP32_BYTES * parameters + activations + logits + outside,
        resident=resident + outside,
        at_start=resident + outside - states * (STATES - 1) // STATES,
        left=outside + LEFT_BYTES,
        host=resident,
    )
