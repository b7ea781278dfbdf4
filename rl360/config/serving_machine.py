"""What SGLang servers need of the GPUs and of the model, looked at before any is started.

In: a typed config with engine sglang, the model's numbers, the cards that were found. Out: `Looked`: the forecast,
problems and warnings. Left to others: asking for cards (files), bytes (forecast_engine, forecast_sharing), what needs
neither model nor machine (serving).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rl360.config.forecast import RANK_BYTES, Forecast, ModelShape
from rl360.config.forecast_sharing import ServingForecast, serving_forecast
from rl360.config.forecast_trainer import trainer_gpus
from rl360.config.schemas import MegatronTrainerConfig, RootConfig
from rl360.config.serving import last_server_port
from rl360.errors import ConfigError, InfrastructureError
from rl360.gateway.ports import LAST_PORT
from rl360.serving.command import program_path
from rl360.serving.ports import claim_ports

# What a forecast of a trainer on a CPU counts in the host's memory, and one on a GPU does not have there.
_ON_THE_GPU = ("weights", "gradients", "adam", "activations", "logits_chunk", "reference")


@dataclass(slots=True)
class Looked:
    """What was found of the servers."""

    forecast: ServingForecast | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look_at_servers(
    config: RootConfig, model: ModelShape | None, capacity: int | None, num_cards: int | None, trainer_fits: bool = True
) -> Looked:
    """capacity: bytes of a card, None: unknown. num_cards: None: another machine's. trainer_fits: by itself."""
    found = Looked()
    _count(config, num_cards, found)
    if model is None:
        return found
    tokens = config.rollout.max_context_tokens
    if model.max_positions is not None and tokens > model.max_positions:
        found.problems.append(
            f"rollout.max_context_tokens: {tokens} is more than the model's {model.max_positions} positions "
            "(max_position_embeddings), and SGLang does not start then; expected at most that"
        )
    try:
        found.forecast = forecast = serving_forecast(config, model, capacity, num_cards)
    except ConfigError as error:
        found.problems.extend(error.problems)
        return found
    problems = forecast.problems()
    if not trainer_fits:  # its own message says what to turn; here what is wrong with the servers alone
        problems = [problem for problem in problems if problem.startswith("rollout.sglang.mem_fraction_static")]
    (found.warnings if forecast.assumed else found.problems).extend(problems)
    found.warnings.extend(forecast.warnings())
    return found


def command_problems(config: RootConfig) -> Iterator[str]:
    """A command of one's own that this machine does not have."""
    command = config.rollout.sglang.command
    if config.rollout.engine == "sglang" and command and shutil.which(command[0], path=program_path()) is None:
        yield (
            f"rollout.sglang.command: {command[0]} is no program here; expected what takes SGLang's flags, or none for "
            "this Python's SGLang"
        )


def port_problems(config: RootConfig) -> Iterator[str]:
    """Fixed ports of servers that somebody has, or another run for servers that do not listen yet."""
    settings = config.rollout.sglang
    if config.rollout.engine != "sglang" or not 0 < settings.base_port <= last_server_port(settings) <= LAST_PORT:
        return
    try:
        claim_ports(settings.num_servers, settings.base_port, config.gateway.host).close()
    except InfrastructureError as error:
        yield f"rollout.sglang.base_port: {str(error).partition(': ')[2]}; expected free ones, or 0 to take any"


def with_servers(host: Forecast, servers: ServingForecast) -> Forecast:
    """The machine's memory, with servers and with what a trainer that has left its GPUs puts there."""
    memory = dict(host.memory)
    on_gpu = trainer_gpus(servers.config) > 0 and not isinstance(servers.config.trainer, MegatronTrainerConfig)
    if on_gpu:
        memory = {name: count for name, count in memory.items() if name not in _ON_THE_GPU}
        memory["driver"] = RANK_BYTES
    return replace(host, memory={**memory, **servers.host})


def _count(config: RootConfig, num_cards: int | None, found: Looked) -> None:
    """Whether this machine has the GPUs: for servers, and for the trainer where they do not take turns."""
    if num_cards is None:
        return
    settings, taken = config.rollout.sglang, trainer_gpus(config)
    needed = settings.num_servers * settings.tensor_parallel_size
    servers = f"{settings.num_servers} server{'s' if settings.num_servers > 1 else ''} of tensor_parallel_size"
    servers += f" {settings.tensor_parallel_size} need{'s' if settings.num_servers == 1 else ''} {needed} GPU"
    servers += "" if needed == 1 else "s"
    has = f"this machine has {num_cards or 'none'}"
    if num_cards > 0 and taken == 0 and config.rollout.sync == "nccl":
        found.problems.append(
            f"rollout.sync: nccl, and {has} GPU{'s' if num_cards > 1 else ''} of which the trainer uses none: its "
            "weights are on the CPU, where NCCL sends nothing from; expected disk, or a trainer on a GPU"
        )
    if num_cards == 0:
        found.problems.append(
            f"rollout.sglang: {servers}, {has}; try a cluster, or the embedded engine as a server: "
            "'rollout.sglang.command=[python,-m,rl360.gateway.embedded.serve]' rollout.sglang.dtype=float32"
        )
    elif missing := [number for number in settings.devices if number >= num_cards]:
        found.problems.append(
            f"rollout.sglang.devices: {', '.join(map(str, missing))}, and {has} GPUs, from 0 to {num_cards - 1}"
        )
    elif not settings.devices and needed > num_cards:
        found.problems.append(f"rollout.sglang: {servers}, {has}; try fewer servers or a smaller tensor_parallel_size")
    elif not (settings.devices or settings.colocated) and taken + needed > num_cards >= taken:
        together = f"rollout.sglang: {servers}, the trainer takes {taken}, and {has}"
        if isinstance(config.trainer, MegatronTrainerConfig):
            found.problems.append(f"{together}; try fewer servers, or rollout.sglang.colocated=true rollout.sync=ipc")
        elif config.rollout.sync == "nccl":
            found.problems.append(
                f"{together}, so two ranks of one group would share a GPU, which rollout.sync=nccl cannot; expected "
                "ipc or disk"
            )
        else:
            found.warnings.append(f"{together}: they share GPUs and keep all their memory")
