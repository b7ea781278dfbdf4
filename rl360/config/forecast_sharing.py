"""Whether SGLang servers, and a trainer on the same GPUs, fit a card at every phase of an iteration; else what to turn.

In: a typed config with engine sglang, a model's numbers, a card's memory. Out: `ServingForecast`: the phases' bytes,
lines for `rl360 check`, problems and warnings, bytes of host memory. Left to others: the server's bytes
(forecast_engine), the trainer's (forecast_trainer), which cards there are (files).

A phase is a stretch of an iteration in which nothing changes hands (rl360.weight_sync.colocated has the order):

    steps         the trainer at its peak beside an engine that gave KV cache and weights away
    weights load  the engine has its weights again; the trainer gave back what its step took, and has buckets
    rollout       the engine at its fullest; of the trainer only what cannot leave

Without the hand-over both sides are there at once, in one phase.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rl360.config.forecast import GIB, MIB, RANK_BYTES, ModelShape
from rl360.config.forecast_engine import (
    BESIDE_WEIGHTS_BYTES,
    EngineForecast,
    Server,
    forecast_engine,
    tensor_misfits,
)
from rl360.config.forecast_trainer import TrainerOnGpu, host_bytes, trainer_gpus, trainer_on_gpu
from rl360.config.gpu_memory import MARGIN, MOST_ADVICE, USUAL_GPU_GIB
from rl360.config.schemas import MegatronTrainerConfig, RootConfig
from rl360.errors import ConfigError

# What a server needs beside weights and cache is an estimate: it may be half as much again.
WORKING_DOUBT = 0.5
PEER_CONTEXT_BYTES = 500 * MIB  # a process's CUDA context on a GPU where it computes nothing; a usual value
BUCKETS = 3  # one on its way, the next one's tensors, and their copy laid flat
SERVER_HOST_BYTES = 1536 * MIB  # tokenizer and detokenizer processes of a server; its ranks are counted as others'
PHASE_STEPS, PHASE_LOAD, PHASE_ROLLOUT, PHASE_BOTH = "trainer steps", "weights load", "rollout", "trainer and engine"


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes of one GPU by whose they are. `doubt`: how much more it may be."""

    name: str
    parts: Mapping[str, int]
    doubt: int

    @property
    def needed(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ServingForecast:
    """One GPU of a server, the fullest where some are shared. `trainer` None: the engine has it alone."""

    config: RootConfig
    engine: EngineForecast
    trainer: TrainerOnGpu | None
    phases: tuple[Phase, ...]
    host: Mapping[str, int]  # memory of the machine, for servers and for a trainer that has left its GPUs
    capacity: int
    assumed: bool  # nobody could be asked for the card's memory
    num_cards: int | None  # of this machine; None: unknown

    @property
    def fits(self) -> bool:
        """Servers start, hold one request, and no phase needs more than the card has."""
        return self.engine.contexts >= 1 and all(phase.needed <= self.capacity for phase in self.phases)

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.needed)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def problems(self) -> list[str]:
        """What does not fit, with what to turn: first a server that would not start or hold a request."""
        engine = self.engine
        found = []
        fraction = f"rollout.sglang.mem_fraction_static: {engine.fraction:g} of {_gib(engine.free)} on {self._card()}"
        if engine.tokens == 0:
            found.append(
                f"{fraction} is less than a server's weights ({_gib(engine.weights + BESIDE_WEIGHTS_BYTES)} a GPU): it "
                f"would not start; {self._fraction_hint()}"
            )
        elif engine.contexts < 1:
            found.append(
                f"{fraction} leaves a KV cache of {engine.tokens:,} tokens, less than one request of "
                f"rollout.max_context_tokens {engine.server.context_tokens:,}; {self._fraction_hint()}"
            )
        worst = self.fullest
        if worst.needed > self.capacity:
            also = [
                f", {p.name} ({_gib(p.needed)})" for p in self.phases if p.needed > self.capacity and p is not worst
            ]
            found.append(
                f"rollout.sglang: {_gib(worst.needed)} forecast on a GPU in the phase '{worst.name}' "
                f"({_named(worst.parts)}){''.join(also)}, {self._card()}; {self._hint()}"
            )
        return found

    def warnings(self) -> list[str]:
        """What fits, and may yet disappoint."""
        found = []
        for phase in self.phases:
            if phase.needed <= self.capacity < phase.needed + phase.doubt:
                found.append(
                    f"rollout.sglang: {_gib(phase.needed)} forecast on a GPU in the phase '{phase.name}', "
                    f"{self._card()}: nearer to the limit than the forecast is sure of ({_gib(phase.doubt)})"
                )
        server, contexts = self.engine.server, self.engine.contexts
        if 1 <= contexts < server.running:
            wish = self.engine.least_fraction
            more = f"rollout.sglang.mem_fraction_static={wish:g}, " if self.engine.fraction < wish <= 0.95 else ""
            fewer = int(contexts) * self.config.rollout.sglang.num_servers
            found.append(
                f"rollout.concurrency: a server decodes up to {server.running} attempts at once, and its KV cache of "
                f"{self.engine.tokens:,} tokens holds {contexts:.1f} of full length ({server.context_tokens:,}): "
                f"SGLang preempts some then, and computes them again; try {more}rollout.concurrency={fewer}, "
                "rollout.sglang.tensor_parallel_size, or more servers"
            )
        return found

    def lines(self) -> list[str]:
        """A table: one row a phase, GiB of one GPU by whose they are."""
        settings, engine = self.config.rollout.sglang, self.engine
        whose = "null" if engine.server.mem_fraction is None else "given"
        head = (
            f"{settings.num_servers} SGLang server{'s' if settings.num_servers > 1 else ''} of tensor "
            f"{settings.tensor_parallel_size}: KV cache of {engine.tokens:,} tokens ({engine.server.token_bytes:,} "
            f"bytes a token and GPU), {engine.contexts:.1f} requests of {engine.server.context_tokens:,} tokens, "
            f"{engine.server.requests} open at once; mem_fraction_static {engine.fraction:g} ({whose}) of "
            f"{engine.free / GIB:.1f} GiB free"
        )
        rows = [["phase", *_COLUMNS, "needed", f"of GiB{', assumed' if self.assumed else ''}"]]
        for phase in self.phases:
            columns = _columns(phase)
            rows.append(
                [
                    phase.name,
                    *(f"{columns[name] / GIB:.1f}" for name in _COLUMNS),
                    f"{phase.needed / GIB:.1f}",
                    f"{self.capacity / GIB:.1f}",
                ]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        host = [f"host memory: {_named(self.host)}"] if self.host else []
        return [head, *table, *host]

    def to_dict(self) -> dict[str, Any]:
        """Bytes, for plan.json."""
        return {
            "tokens": self.engine.tokens,
            "mem_fraction_static": self.engine.fraction,
            "free": self.engine.free,
            "paused": self.engine.paused,
            "engine": self.engine.parts,
            "phases": {phase.name: dict(phase.parts) for phase in self.phases},
            "host": dict(self.host),
        }

    def _card(self) -> str:
        if self.assumed:
            return f"a GPU of assumed {_gib(self.capacity)} (cluster.gpu_memory_gib says it)"
        return f"a GPU of {_gib(self.capacity)}"

    def _fraction_hint(self) -> str:
        least = self.engine.least_fraction
        return self._hint() if advice(self) or least > 0.99 else f"expected at least {least:g}"

    def _hint(self) -> str:
        found = advice(self)
        return (
            f"try {', or '.join(found)}"
            if found
            else "no knob or pair of them is enough; more GPUs or a shorter context"
        )


def serving_forecast(
    config: RootConfig, model: ModelShape, capacity: int | None, num_cards: int | None = None
) -> ServingForecast:
    """capacity: bytes that CUDA can give out on one GPU; None: unknown. num_cards: of this machine; None: unknown.

    Raises `ConfigError` when the model does not split as asked, by the servers or by the trainer.
    """
    settings = config.rollout.sglang
    if problems := tensor_misfits(model, settings.tensor_parallel_size):
        raise ConfigError(problems)
    card = capacity or int(USUAL_GPU_GIB * GIB)
    trainer = trainer_on_gpu(config, model, server_gpus(config, num_cards))
    colocated = trainer is not None and settings.colocated
    taken = 0 if trainer is None else trainer.left if colocated else trainer.at_start
    engine = forecast_engine(Server.of(config, model), card, taken)
    host = {"servers": settings.num_servers * (settings.tensor_parallel_size * RANK_BYTES + SERVER_HOST_BYTES)}
    if colocated:
        host["offloaded_trainer"] = host_bytes(config, model)
    # A server opens the trainer's memory on the GPU of the rank that sends, and keeps a context there.
    others = settings.num_servers * settings.tensor_parallel_size - 1
    peers = others * PEER_CONTEXT_BYTES if trainer is not None and config.rollout.sync == "ipc" else 0
    phases = _phases(config, engine, trainer, card, peers)
    return ServingForecast(config, engine, trainer, phases, host, card, capacity is None, num_cards)


def server_gpus(config: RootConfig, num_cards: int | None = None) -> list[int]:
    """Numbers of the servers' GPUs, as rl360.engine.engines.server_devices gives them out."""
    settings = config.rollout.sglang
    needed = settings.num_servers * settings.tensor_parallel_size
    if settings.devices:
        return list(settings.devices[:needed])
    taken = trainer_gpus(config)
    if settings.colocated or (num_cards is not None and num_cards - taken < needed):
        return list(range(needed))
    return list(range(taken, taken + needed))


def _phases(
    config: RootConfig, engine: EngineForecast, trainer: TrainerOnGpu | None, capacity: int, peers: int
) -> tuple[Phase, ...]:
    rollout = config.rollout
    doubt = int(WORKING_DOUBT * sum(engine.working.values()))
    model = engine.server.model
    largest = 2 * model.hidden_size * max(model.vocab_size, model.intermediate_size)
    bucket = max(int(rollout.sglang.bucket_gib * GIB), largest)
    outside = sum(engine.outside.values()) + peers
    serves = {
        "engine": outside,
        "weights": engine.weights + BESIDE_WEIGHTS_BYTES,
        "KV cache": engine.kv_cache,
        "working": sum(engine.working.values()),
    }
    if trainer is None:
        phases = [Phase(PHASE_ROLLOUT, serves, doubt)]
        if rollout.sync == "nccl":  # a bucket and a group, while nothing computes
            idle = serves | {"working": engine.working["buffers"] + engine.working["CUDA graphs"]}
            idle["working"] += engine.working["request table"] + bucket
            phases.append(Phase(PHASE_LOAD, idle, doubt))
        return tuple(phases)
    buckets = BUCKETS * bucket if rollout.sync in ("ipc", "nccl") else 0
    sending = trainer.resident + buckets
    room = int(MARGIN * capacity)
    if not rollout.sglang.colocated:  # buckets come from what the allocator kept of the step
        return (Phase(PHASE_BOTH, {"trainer": max(trainer.peak, sending), **serves}, doubt + room),)
    paused = {"engine": engine.paused + peers}
    return (
        Phase(PHASE_STEPS, {"trainer": trainer.peak, **paused}, room),
        Phase(PHASE_LOAD, {"trainer": sending, **paused, "weights": serves["weights"]}, room),
        Phase(PHASE_ROLLOUT, {"trainer": trainer.left, **serves}, doubt),
    )


def advice(found: ServingForecast) -> list[str]:
    """Overrides each of which makes it fit, the least costly in speed first; where none does alone, pairs."""
    groups = [group for group in _knobs(found) if group]
    single = [text for group in groups if (text := _first_fitting(found, group)) is not None]
    if single:
        return single[:MOST_ADVICE]
    pairs = ([{**one, **other} for one in first for other in then] for first, then in combinations(groups, 2))
    return [text for pair in pairs if (text := _first_fitting(found, pair)) is not None][:MOST_ADVICE]


def _first_fitting(found: ServingForecast, group: Iterable[Mapping[str, Any]]) -> str | None:
    for overrides in group:
        try:
            changed = _changed(found.config, overrides)
            tried = serving_forecast(changed, found.engine.server.model, found.capacity, found.num_cards)
        except ConfigError:
            continue
        if tried.fits:
            text = " ".join(f"{key}={_text(value)}" for key, value in overrides.items())
            return f"{text} ({_gib(tried.fullest.needed)})"
    return None


def _knobs(found: ServingForecast) -> Iterator[list[dict[str, Any]]]:
    """Each knob with its further values, mildest first."""
    config, engine = found.config, found.engine
    settings, trainer = config.rollout.sglang, config.trainer
    fraction = "rollout.sglang.mem_fraction_static"
    if engine.contexts < 1:
        yield [{fraction: engine.least_fraction}] if engine.fraction < engine.least_fraction <= 0.99 else []
    else:
        steps = range(int(engine.fraction * 20) + 1, 0, -1)
        yield [{fraction: n / 20} for n in steps if n / 20 < engine.fraction]
    if found.trainer is not None and not settings.colocated and config.rollout.max_staleness == 0:
        yield [{"rollout.sglang.colocated": True, "rollout.sync": "ipc"}]
    if settings.cuda_graph_max_bs != 0:
        yield [{"rollout.sglang.cuda_graph_max_bs": n} for n in (64, 16, 0) if n != settings.cuda_graph_max_bs]
    if found.trainer is not None and isinstance(trainer, MegatronTrainerConfig):
        least = -(-config.rollout.max_context_tokens // trainer.context_parallel_size)
        budgets = [n for n in (trainer.max_tokens_per_gpu // 2**k for k in range(1, 6)) if n >= max(least, 256)]
        yield [{"trainer.max_tokens_per_gpu": n} for n in budgets]
        yield [{"trainer.recompute": "full"}] if trainer.recompute != "full" else []
    elif found.trainer is not None and not getattr(trainer, "gradient_checkpointing", True):
        yield [{"trainer.gradient_checkpointing": True}]
    yield list(_larger_servers(found))


def _larger_servers(found: ServingForecast) -> Iterator[dict[str, Any]]:
    """More GPUs a server: on the same GPUs with fewer servers where those can be halved, else on more."""
    settings = found.config.rollout.sglang
    most = trainer_gpus(found.config) if settings.colocated else 8
    tensor, servers = settings.tensor_parallel_size, settings.num_servers
    while (tensor := 2 * tensor) <= 8:
        fewer = servers // 2 if servers % 2 == 0 else servers
        if fewer * tensor > max(most, settings.num_servers * settings.tensor_parallel_size) or settings.devices:
            return
        change: dict[str, Any] = {"rollout.sglang.tensor_parallel_size": tensor}
        yield change if fewer == settings.num_servers else change | {"rollout.sglang.num_servers": fewer}
        servers = fewer


def _changed(config: RootConfig, overrides: Mapping[str, Any]) -> RootConfig:
    changed = copy.deepcopy(config)
    for key, value in overrides.items():
        *groups, name = key.split(".")
        node: Any = changed
        for group in groups:
            node = getattr(node, group)
        setattr(node, name, value)
    return changed


# Columns of the table; a phase has some of them.
_COLUMNS = ("trainer", "engine", "weights", "KV cache", "working")


def _columns(phase: Phase) -> dict[str, int]:
    return {name: phase.parts.get(name, 0) for name in _COLUMNS}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _named(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(count)}" for name, count in parts.items())


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
