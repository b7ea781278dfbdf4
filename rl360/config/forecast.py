"""How much memory and disk an experiment will take, computed from numbers before anything is loaded. Pure.

In: a model's config.json and the experiment. Out: bytes by what they are for. Measured sizes of what is there, and the
comparison, are left to rl360.config.files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl360.config.schemas import MegatronTrainerConfig, RootConfig, TorchTrainerConfig
from rl360.config.workers import num_trial_workers

GIB = 1024**3
MIB = 1024**2

BF16_BYTES, FP32_BYTES = 2, 4
ADAM_BYTES = 8  # two fp32 moments a parameter
DRIVER_BASE_BYTES = 600 * MIB  # an interpreter with torch and its libraries, measured on a CPU build
WORKER_BYTES = 100 * MIB  # an interpreter with Harbor, without torch: 54 MiB measured, and a few MiB an open trial
RANK_BYTES = 4 * GIB  # host memory of one rank: torch with CUDA's libraries and NCCL's buffers, 3-4 GiB are usual
PROXY_BYTES = 100 * MIB  # 71 MiB measured
# fp32 values that a layer keeps for its backward, in units of its widths: inputs, norms, q, k, v, attention, gate, up.
ACTIVATION_HIDDEN_UNITS = 8
ACTIVATION_FFN_UNITS = 4
# Trajectories: ids, masks, logprobs and text of a token, compressed.
TRAJECTORY_BYTES_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a Llama-like decoder that decide its size, named as in `rl360.models.decoder.DecoderConfig`."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qk_norm: bool = False
    norm_groups: int = 1
    max_positions: int | None = None  # that config.json gives, where nothing scales them

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelShape:
        """From a config.json. Raises `KeyError` with the key that is missing."""
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=config.get("model_type") == "qwen3",
            norm_groups=int(config.get("layernorm_num_groups") or 1),
            max_positions=_positions(config),
        )

    @property
    def num_parameters(self) -> int:
        """Norms included, biases not: Llama-like models have none."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + self.hidden_size + embeddings

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * FP32_BYTES


def _positions(config: Mapping[str, Any]) -> int | None:
    positions = config.get("max_position_embeddings")
    ropes = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    return None if positions is None or any("factor" in rope for rope in ropes) else int(positions)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes by what they are for: memory of the driver and its children, disk under the run folder."""

    memory: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())


def forecast(shape: ModelShape, config: RootConfig) -> Forecast:
    """Forecast a run on one machine, weights in fp32 (the CPU trainer's; a GPU's masters are fp32 as well).

    The KV cache is counted at what the open requests can fill, at most at its limit. Activations are those of one
    micro-batch; an attempt longer than the micro-batch budget gets its own.
    """
    trainer = config.trainer
    if isinstance(trainer, MegatronTrainerConfig):
        return _of_ranks(shape.num_parameters, trainer, config)
    parameters = shape.num_parameters
    weights = parameters * FP32_BYTES
    recomputes = isinstance(trainer, TorchTrainerConfig) and trainer.gradient_checkpointing
    tokens = max(trainer.max_tokens_per_gpu, config.rollout.max_context_tokens)
    per_layer = (
        tokens
        * FP32_BYTES
        * (ACTIVATION_HIDDEN_UNITS * shape.hidden_size + ACTIVATION_FFN_UNITS * shape.intermediate_size)
    )
    kept_layers = 1 if recomputes else shape.num_layers
    checkpointed = tokens * FP32_BYTES * shape.hidden_size * shape.num_layers if recomputes else 0
    logits_rows = min(trainer.logprob_chunk_tokens, tokens)
    memory = {
        "weights": weights,
        "gradients": weights,
        "adam": parameters * ADAM_BYTES,
        "activations": per_layer * kept_layers + checkpointed,
        "logits_chunk": 2 * logits_rows * shape.vocab_size * FP32_BYTES,
        "driver": DRIVER_BASE_BYTES,
        "proxy": PROXY_BYTES,
        "trial_workers": num_trial_workers(config.rollout) * WORKER_BYTES,
    }
    if config.algorithm.kl_coef > 0:
        memory["reference"] = weights
    if config.rollout.engine == "embedded":
        rows = min(config.rollout.max_running_requests, config.rollout.concurrency)
        open_tokens = rows * config.rollout.max_context_tokens
        memory["kv_cache"] = min(int(config.rollout.kv_cache_gib * GIB), open_tokens * shape.kv_bytes_per_token)
    return Forecast(memory, _disk(parameters, config, FP32_BYTES, FP32_BYTES + ADAM_BYTES))


def _of_ranks(parameters: int, trainer: MegatronTrainerConfig, config: RootConfig) -> Forecast:
    """Where the weights lie on GPUs: what the host has beside them. The GPUs' own: rl360.config.gpu_memory."""
    saved = BF16_BYTES + FP32_BYTES + ADAM_BYTES
    memory = {
        "ranks": trainer.num_gpus * RANK_BYTES,
        "driver": DRIVER_BASE_BYTES,
        "proxy": PROXY_BYTES,
        "trial_workers": num_trial_workers(config.rollout) * WORKER_BYTES,
    }
    if trainer.async_checkpoint:
        memory["checkpoint_copy"] = parameters * saved  # it leaves the GPU before it is written
    return Forecast(memory, _disk(parameters, config, BF16_BYTES, saved))


def writes_checkpoints(config: RootConfig) -> bool:
    """Whether a run writes any; an interrupted one counts."""
    return config.checkpoint.at_end or config.checkpoint.every > 0 or keeps_best(config)


def keeps_best(config: RootConfig) -> bool:
    """Whether evaluations leave a checkpoint."""
    evaluation = config.evaluation
    evaluates = evaluation.tasks is not None and (evaluation.at_start or evaluation.every > 0)
    return config.checkpoint.keep_best and evaluates


def _disk(parameters: int, config: RootConfig, weight_bytes: int, saved_bytes: int) -> dict[str, int]:
    """weight_bytes: of a parameter in an HF folder; saved_bytes: of one with its optimizer's state."""
    weights = parameters * weight_bytes
    kept = 0
    if writes_checkpoints(config):
        kept = config.checkpoint.keep_last + int(config.checkpoint.keep_best) + 1  # one more while it is written
        if config.checkpoint.keep_every:
            kept += config.iterations // config.checkpoint.keep_every
    attempts = config.iterations * config.tasks_per_iteration * config.group_size
    disk = {
        "checkpoints": kept * parameters * saved_bytes,
        "trajectories": attempts * config.rollout.max_context_tokens * TRAJECTORY_BYTES_PER_TOKEN,
    }
    if config.checkpoint.hf:
        disk["hf_checkpoint"] = weights
    if config.rollout.sync == "disk":
        disk["published_weights"] = 2 * weights  # the new one is complete before the old one goes
    return disk
