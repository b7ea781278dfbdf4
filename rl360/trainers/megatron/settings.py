"""What every rank of the Megatron trainer is told. No torch: the driver makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl360.models.megatron.layout import Layout
from rl360.protocols import Algorithm

# GiB that a rank's GPU held at most during a step: tensors, and what the allocator kept for them.
PEAK_MEMORY = "perf/peak_memory_gib_max"
PEAK_RESERVED = "perf/peak_reserved_gib_max"


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Fields are the keys of `MegatronTrainerConfig` where they have their names."""

    layout: Layout
    model_dir: Path  # HF folder of the initial policy, and of the reference model
    algorithm: Algorithm
    learning_rate: float
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    logprob_chunk_tokens: int = 1024
    recompute: str = "none"
    compile: bool = True
    overlap_grad_reduce: bool = False
    transformer_engine: bool = False
    random_init_seed: int | None = None  # None: the folder's weights
    fp32_logits: bool = True  # final logits of bf16 weights in fp32
    seed: int = 0
