"""What trainer=megatron asks of the rest of an experiment and of the model: layouts that divide, deadlines that nest.

In: a typed config; for the second function a model's shape too. Out: problems as `key: what; expected; try`. Neither
torch nor Megatron is imported. Room on the GPUs is left to rl360.trainers.megatron.memory, which GPUs there are to
rl360.config.files.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rl360.config.forecast import ModelShape
from rl360.config.schemas import MegatronTrainerConfig, RootConfig

OUR_RANK = MegatronTrainerConfig.rank_target


def megatron_problems(config: RootConfig) -> Iterator[str]:
    """Everything that can be said without knowing the model. Nothing for another trainer."""
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig):
        return
    if config.rollout.engine == "embedded":
        yield (
            "rollout.engine: embedded shares the weights of one process, and trainer=megatron spreads them over "
            f"{trainer.num_gpus} ranks; expected servers, try rollout=external or rollout=sglang"
        )
    yield from _layout(trainer)
    address = urlsplit(trainer.init_method)
    if address.scheme != "tcp" or not address.hostname or _port(trainer.init_method) is None:
        yield f"trainer.init_method: {trainer.init_method!r}; expected tcp://host:port, port 0 for a free one"
    for key in ("start_timeout_s", "step_timeout_s"):
        seconds = getattr(trainer, key)
        if seconds >= config.cluster.no_progress_s:
            yield (
                f"trainer.{key}: {seconds:g} s is not less than cluster.no_progress_s {config.cluster.no_progress_s:g} "
                "s, so the watchdog would end the run first and not say which rank is late; expected less"
            )


def _port(address: str) -> int | None:
    try:
        return urlsplit(address).port
    except ValueError:
        return None


def _layout(trainer: MegatronTrainerConfig) -> Iterator[str]:
    sizes = (trainer.tensor_parallel_size, trainer.context_parallel_size, trainer.pipeline_parallel_size)
    if min(sizes) < 1 or trainer.num_gpus < 1:
        return  # the ranges have named it
    replica = sizes[0] * sizes[1] * sizes[2]
    if trainer.num_gpus % replica:
        yield (
            f"trainer.num_gpus: {trainer.num_gpus} GPUs do not make whole replicas of {replica} (tensor {sizes[0]} x "
            f"context {sizes[1]} x pipeline {sizes[2]}); expected a multiple of {replica}"
        )
    if trainer.virtual_pipeline_parallel_size is not None and trainer.pipeline_parallel_size == 1:
        yield (
            f"trainer.virtual_pipeline_parallel_size: {trainer.virtual_pipeline_parallel_size} with one pipeline "
            "stage; expected null, or pipeline_parallel_size of at least 2"
        )


def model_problems(config: RootConfig, shape: ModelShape) -> Iterator[str]:
    """What of the layout does not divide the model, each with sizes that would."""
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig):
        return
    tensor, pipeline = trainer.tensor_parallel_size, trainer.pipeline_parallel_size
    if tensor < 1 or pipeline < 1:
        return
    parts = {"heads": shape.heads, "key/value heads": shape.kv_heads, "ffn width": shape.ffn}
    if misfits := [f"{count} {name}" for name, count in parts.items() if count % tensor]:
        fitting = [n for n in range(1, shape.kv_heads + 1) if all(count % n == 0 for count in parts.values())]
        yield (
            f"trainer.tensor_parallel_size: {tensor} does not divide {' nor '.join(misfits)} of the model; expected "
            f"one of {', '.join(map(str, fitting))}"
        )
    chunks = pipeline * (trainer.virtual_pipeline_parallel_size or 1)
    if shape.layers % chunks:
        key = "pipeline_parallel_size" if shape.layers % pipeline else "virtual_pipeline_parallel_size"
        whole = shape.layers if key == "pipeline_parallel_size" else shape.layers // pipeline
        fitting = [n for n in range(1, whole + 1) if whole % n == 0]
        yield (
            f"trainer.{key}: {getattr(trainer, key)} does not divide {whole} layers"
            f"{' of a stage' if whole != shape.layers else ''}; expected one of {', '.join(map(str, fitting))}"
        )
