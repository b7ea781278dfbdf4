"""What trainer=megatron asks of the rest of an experiment: GPUs that divide, engines of their own, deadlines that nest.

In: a typed config. Out: problems as `key: what; expected; try`. Neither torch nor Megatron is imported. Whether the
layout divides the model and fits its GPUs is left to rl360.config.gpu_memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from urllib.parse import urlsplit

from rl360.config.gpu_memory import layout_of
from rl360.config.schemas import ClusterConfig, MegatronTrainerConfig, RootConfig
from rl360.errors import ConfigError
from rl360.gateway.ports import bind_error
from rl360.models.megatron.layout import TE_INSTALL


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
    yield from _shared_gpus(config, trainer)
    try:
        layout = layout_of(trainer)
    except ConfigError as error:
        yield from error.problems
    else:
        least = layout.token_multiple // layout.context
        if 1 <= trainer.max_tokens_per_gpu < least:
            yield (
                f"trainer.max_tokens_per_gpu: {trainer.max_tokens_per_gpu}; a GPU's part of a micro-batch is padded to "
                f"a multiple of {least} tokens in this layout; expected at least that many"
            )
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


def megatron_machine_problems(config: RootConfig) -> Iterator[str]:
    """What the trainer needs and this machine has not, where its ranks run here; elsewhere they say it themselves."""
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig) or config.cluster._target_ != ClusterConfig._target_:
        return
    address, port = urlsplit(trainer.init_method), _port(trainer.init_method)
    if address.hostname and port is not None and (error := bind_error(address.hostname, port)):
        yield (
            f"trainer.init_method: {trainer.init_method} is no free place of this machine, where the ranks run "
            f"({error}); expected tcp://127.0.0.1:0, or a free port of an address of it"
        )
    ours = trainer.rank_target == MegatronTrainerConfig.rank_target
    if ours and trainer.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        yield f"trainer.transformer_engine: true, and Transformer Engine is not installed; try {TE_INSTALL}, or false"


def _shared_gpus(config: RootConfig, trainer: MegatronTrainerConfig) -> Iterator[str]:
    """On one machine ranks take its first GPUs; servers beside them get those behind, take turns, or share a GPU for
    good: told to (devices) and told how much of its memory is theirs."""
    if config.rollout.engine != "sglang" or config.cluster._target_ != ClusterConfig._target_:
        return
    sglang = config.rollout.sglang
    if sglang.colocated or trainer.rank_target != MegatronTrainerConfig.rank_target:
        return
    needed = sglang.num_servers * sglang.tensor_parallel_size
    both = [number for number in sglang.devices[:needed] if number < trainer.num_gpus]
    if both and (sglang.mem_fraction_static is None or config.rollout.sync == "nccl"):
        others = list(range(trainer.num_gpus, trainer.num_gpus + needed))
        yield (
            f"rollout.sglang.devices: GPU {', '.join(map(str, both))} of the servers would be the trainer's too "
            f"(trainer.num_gpus {trainer.num_gpus}); expected others, such as {others}, or rollout.sglang.colocated, "
            "or a rollout.sglang.mem_fraction_static that leaves the trainer its memory, and rollout.sync=ipc or disk"
        )


def _port(address: str) -> int | None:
    try:
        return urlsplit(address).port
    except ValueError:
        return None
