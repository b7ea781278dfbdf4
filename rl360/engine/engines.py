"""Servers and how weights reach them, from the config: those that the run starts, and those that are there already.

In: a checked config, the run folder, the engines' key. Out: URLs and a weight sync; what was started is closed by the
stack that was passed in. The embedded engine shares the trainer's process and is rl360.engine.build's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl360.config.schemas import MegatronTrainerConfig, RootConfig, SGLangConfig
from rl360.errors import ConfigError
from rl360.serving.command import SGLANG, ServerFlags, launches, server_context
from rl360.serving.fleet import Fleet, WatchSettings
from rl360.serving.ports import claim_ports
from rl360.weight_sync.colocated import ColocatedSync
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import BroadcastTransport, DiskTransport, HandleTransport, Transport

log = logging.getLogger(__name__)

GIB = 2**30
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
WEIGHTS = "weights"  # folder of published weights in the run's
TRAINER_METHODS = ("start", "step", "publish", "save", "restore", "close")  # of rl360.protocols.Trainer
SHARES_ITS_GPUS = ("offload", "onload", "trim")  # besides, where it is colocated with servers


def require_methods(config: RootConfig, trainer: Any) -> None:
    """Before anything starts: the trainer, which may be somebody's own, has every method that this run will call.

    Raises ConfigError with every problem, naming its class and the methods that it has not.
    """
    name = type(trainer).__name__
    problems = []
    if missing := _missing(trainer, TRAINER_METHODS):
        problems.append(f"trainer._target_: {name} has no {', '.join(missing)}; expected a rl360.protocols.Trainer")
    if config.rollout.sglang.colocated and (missing := _missing(trainer, SHARES_ITS_GPUS)):
        problems.append(
            f"rollout.sglang.colocated: true, and {name} has no {', '.join(missing)}; expected a trainer with "
            f"{', '.join(SHARES_ITS_GPUS)}, such as trainer=megatron, or GPUs of its own (colocated=false)"
        )
    if problems:
        raise ConfigError(problems)


def _missing(trainer: Any, methods: Sequence[str]) -> list[str]:
    return [method for method in methods if not callable(getattr(trainer, method, None))]


def sglang_fleet(
    config: RootConfig,
    model_dir: Path,
    run_dir: Path,
    api_key: str | None,
    stack: ExitStack,
    ports: Sequence[tuple[int, int]],
) -> Fleet:
    """The run's servers at `ports`, not started. Raises ConfigError for too few GPUs."""
    settings = config.rollout.sglang
    flags = ServerFlags(
        model_path=model_dir,
        context_length=server_context(config.rollout.max_context_tokens, model_dir),
        command=tuple(settings.command) or SGLANG,
        tensor_parallel_size=settings.tensor_parallel_size,
        dtype=settings.dtype,
        fp32_logits=config.model.fp32_logits,
        load_format="dummy" if config.model.random_init else None,
        seed=config.seed % 2**31,
        host=config.gateway.host,
        attention_backend=settings.attention_backend,
        sampling_backend=settings.sampling_backend,
        grammar_backend=settings.grammar_backend,
        mem_fraction_static=settings.mem_fraction_static,
        max_running_requests=settings.max_running_requests,
        cuda_graph_max_bs=settings.cuda_graph_max_bs,
        prefill_cuda_graph=settings.prefill_cuda_graph,
        memory_saver=settings.memory_saver or settings.colocated,
        external_model_package=settings.external_model_package,
        extra_args=tuple(settings.extra_args),
    )
    watch = WatchSettings(
        start_timeout_s=settings.start_timeout_s,
        health_interval_s=settings.health_interval_s,
        health_timeout_s=settings.health_timeout_s,
        health_failures=settings.health_failures,
        max_restarts=settings.max_restarts,
    )
    visible = every_device() if config.rollout.sync == "ipc" else ()
    plan = launches(flags, ports, server_devices(config), visible)
    if not (own_gpus(config) or settings.devices or settings.colocated):
        log.warning("there are too few GPUs: the servers share the trainer's, and both keep all their memory")
    fleet = Fleet(plan, run_dir / "logs", watch, api_key)
    stack.callback(fleet.close)
    return fleet


def sglang_engines(
    config: RootConfig,
    model_dir: Path,
    run_dir: Path,
    api_key: str | None,
    stack: ExitStack,
    trainer: Any,
    fleet: Fleet,
) -> tuple[tuple[str, ...], FleetSync]:
    """Start the fleet, where it has not begun; its servers hold the model's initial weights until the first sync.

    Colocated, the trainer leaves its GPUs first.

    Raises CheckpointError for a trainer that publishes other tensors than the model has, InfrastructureError
    `engine_start` with the end of a server's log.
    """
    settings = config.rollout.sglang

    def make_engine(url: str) -> WeightEngine:
        return WeightEngine(
            url,
            request_timeout_s=config.rollout.request_timeout_s,
            straggler_s=settings.straggler_s,
            api_key=api_key,
        )

    mode: dict[str, Any] = {
        "mode": config.rollout.sync_mode,
        "drain_timeout_s": config.rollout.drain_timeout_s,
        "model_dir": model_dir,
    }
    arguments = (fleet, _transport(config, run_dir), make_engine, settings.compare_hashes)
    sync = ColocatedSync(*arguments, trainer=trainer, **mode) if settings.colocated else FleetSync(*arguments, **mode)
    stack.callback(sync.close)  # before the fleet's: a replacement may be waiting for weights
    if not _missing(trainer, ("publish",)):  # else these weights stay as they are: a calibration
        sync.check_names(trainer, trainer.version)  # servers need minutes to start
    if settings.colocated:
        trainer.offload()
    urls = fleet.start()
    fleet.bring_up = sync.bring_up
    return urls, sync


def server_ports(config: RootConfig, stack: ExitStack) -> Sequence[tuple[int, int]]:
    """The ports of the run's servers, its own until the stack closes; none where it starts no servers.

    Raises InfrastructureError `engine_start` naming one that another run, or anybody, has.
    """
    if config.rollout.engine != "sglang":
        return ()
    settings = config.rollout.sglang
    ports = claim_ports(settings.num_servers, settings.base_port, config.gateway.host)
    stack.callback(ports.close)
    return ports.pairs


def external_engines(
    config: RootConfig, model_dir: Path, run_dir: Path, api_key: str | None
) -> tuple[tuple[str, ...], FleetSync]:
    """Servers at `rollout.engine_urls`. Their dtype is not known here, so their hashes are not compared."""
    urls = tuple(config.rollout.engine_urls)

    def make_engine(url: str) -> WeightEngine:
        return WeightEngine(url, request_timeout_s=config.rollout.request_timeout_s, api_key=api_key)

    return urls, FleetSync(
        FixedSet(urls),
        DiskTransport(run_dir / WEIGHTS),
        make_engine,
        compare_hashes=False,
        mode=config.rollout.sync_mode,
        drain_timeout_s=config.rollout.drain_timeout_s,
        model_dir=model_dir,
    )


def server_devices(config: RootConfig) -> list[str]:
    """Devices of the servers: colocated the trainer's own, else those behind the trainer's; none where no GPU is.

    Raises ConfigError when Megatron ranks leave too few. A torch trainer on a machine of one GPU shares it with the
    servers, and both keep all their memory: small models allow that.
    """
    settings, trainer = config.rollout.sglang, config.trainer
    found = devices(settings)
    if settings.devices or settings.colocated or not found:
        return found
    taken = _num_trainer_gpus(config)
    needed = settings.num_servers * settings.tensor_parallel_size
    if len(found) - taken >= needed:
        return found[taken:]
    problem = f"the trainer takes {taken} of {len(found)} GPUs, and {needed} are needed for servers"
    if isinstance(trainer, MegatronTrainerConfig):
        raise ConfigError(f"rollout.sglang: {problem}; try fewer servers, or rollout.sglang.colocated=true")
    if config.rollout.sync == "nccl":
        raise ConfigError(f"rollout.sync: nccl, and {problem}: two ranks of one group cannot share a GPU; try ipc")
    return found


def own_gpus(config: RootConfig) -> bool:
    """Whether servers and trainer share no GPU: then both may start at once. True where no GPU is.

    A server measures the memory that is free as it starts, so on a shared GPU it waits for the trainer.
    """
    if config.rollout.sglang.colocated:
        return False
    taken = every_device()[: _num_trainer_gpus(config)]
    used = server_devices(config)[: config.rollout.sglang.num_servers * config.rollout.sglang.tensor_parallel_size]
    return not set(taken) & set(used)


def serving_gpus(config: RootConfig) -> int:
    """GPUs that serve and do not train. Of servers that the run does not start nobody says what they have: 0."""
    settings = config.rollout.sglang
    if config.rollout.engine != "sglang" or settings.colocated:
        return 0
    used = server_devices(config)[: settings.num_servers * settings.tensor_parallel_size]
    return len(set(used) - set(every_device()[: _num_trainer_gpus(config)]))


def _num_trainer_gpus(config: RootConfig) -> int:
    """It takes the first ones that this process may see."""
    if isinstance(config.trainer, MegatronTrainerConfig):
        return config.trainer.num_gpus
    return 0 if getattr(config.trainer, "device", "auto") == "cpu" else 1


def devices(settings: SGLangConfig) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES: of those that this process may see, the ones that the config numbers, or all.

    Raises ConfigError for a number beyond them. Where no GPU can be seen the numbers are the names.
    """
    visible = every_device()
    if not settings.devices:
        return visible
    if not visible:
        return [str(number) for number in settings.devices]
    if outside := [number for number in settings.devices if number >= len(visible)]:
        raise ConfigError(
            f"rollout.sglang.devices: {', '.join(map(str, outside))}; this process sees {len(visible)} GPUs "
            f"({', '.join(visible)}), numbered from 0"
        )
    return [visible[number] for number in settings.devices]


def every_device() -> list[str]:
    """The GPUs that this process may see, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(sorted(NVIDIA_GPUS.iterdir()))] if NVIDIA_GPUS.is_dir() else []


def _transport(config: RootConfig, run_dir: Path) -> Transport:
    settings = config.rollout.sglang
    dtype = None if settings.dtype == "auto" else settings.dtype
    bucket_bytes = int(settings.bucket_gib * GIB)
    if config.rollout.sync == "ipc":
        return HandleTransport(bucket_bytes, dtype)
    if config.rollout.sync == "nccl":
        backend = "nccl" if devices(settings) else "gloo"
        return BroadcastTransport(bucket_bytes, dtype, backend, settings.engines_per_group)
    return DiskTransport(run_dir / WEIGHTS, dtype)
