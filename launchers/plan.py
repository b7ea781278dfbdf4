"""From a checked experiment to what will run where: roles, commands, deadlines, forecasts. Pure.

In: a typed config and what `check` found. Out: a `Plan`, which prints, goes to plan.json and is what a launcher runs.
Nothing is started and no port is taken here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl360.config.combinations import DEADLINES
from rl360.config.files import Found, gib
from rl360.config.schemas import RootConfig


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of process of the run."""

    name: str
    node: str
    processes: int
    what: str
    command: tuple[str, ...] = ()  # empty: started by the driver


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first process starts."""

    name: str
    run_dir: str
    cluster: str
    roles: tuple[Role, ...]
    components: Mapping[str, str]
    model: Mapping[str, Any]
    tasks: Mapping[str, int]
    task_hashes: Mapping[str, Mapping[str, str]]  # purpose -> task id -> content hash; a resume compares them
    batch: Mapping[str, int]
    deadlines_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    disk_bytes: Mapping[str, int]
    gpu_memory_bytes: tuple[Mapping[str, int], ...]  # of each pipeline stage; empty without a forecast for GPUs
    gpu_memory_lines: tuple[str, ...]
    server_memory: Mapping[str, Any]  # of SGLang servers: bytes of a GPU, tokens of the KV cache; empty without any
    machine: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The plan in words, for `rl360 check`."""
        rows = [
            ("experiment", f"{self.name} on {self.cluster}"),
            ("run folder", self.run_dir),
            *((f"  {group}", target) for group, target in self.components.items()),
            ("model", _model_words(self.model)),
            ("tasks", f"{self.tasks['training']} to train on, {self.tasks['evaluation']} to evaluate on, all valid"),
            ("batch", _batch_words(self.batch)),
            ("deadlines", " < ".join(f"{name} {seconds:g} s" for name, seconds in self.deadlines_s.items())),
            ("memory", _room_words(self.memory_bytes, self.machine.get("memory_total", 0), "in the machine")),
            *(("GPU memory" if i == 0 else "", line) for i, line in enumerate(self.gpu_memory_lines)),
            ("disk", _room_words(self.disk_bytes, self.machine.get("disk_free", 0), "free")),
            *((f"  {role.name}", f"{role.processes} x {role.what} ({role.node})") for role in self.roles),
            *(("command", shlex.join(role.command)) for role in self.roles if role.command),
            *(("warning", warning) for warning in self.warnings),
        ]
        width = max(len(label) for label, _ in rows)
        return [f"{label:<{width}}  {text}" for label, text in rows]


def make_plan(config: RootConfig, found: Found, run_dir: Path, roles: tuple[Role, ...]) -> Plan:
    """Put a plan together. run_dir: the run's own folder, which need not exist."""
    evaluations = config.iterations // config.evaluation.every if config.evaluation.every and found.evaluation else 0
    evaluations += int(bool(found.evaluation) and config.evaluation.at_start)
    attempts = config.group_size * config.tasks_per_iteration
    return Plan(
        name=config.name,
        run_dir=str(run_dir),
        cluster=config.cluster.name,
        roles=roles,
        components=_components(config),
        model={
            "folder": str(found.model_dir),
            "num_parameters": found.num_parameters,
            "fp32_logits": config.model.fp32_logits,
        },
        tasks={"training": len(found.training), "evaluation": len(found.evaluation)},
        task_hashes={
            "tasks": {task.task_id: task.content_hash for task in found.training},
            "evaluation.tasks": {task.task_id: task.content_hash for task in found.evaluation},
        },
        batch={
            "iterations": config.iterations,
            "tasks_per_iteration": config.tasks_per_iteration,
            "group_size": config.group_size,
            "attempts_per_iteration": attempts,
            "training_attempts": attempts * config.iterations,
            "evaluation_attempts": evaluations * len(found.evaluation) * config.evaluation.k,
        },
        deadlines_s={name: _seconds(config, key) for name, key in DEADLINES},
        memory_bytes=dict(found.forecast.memory) if found.forecast else {},
        disk_bytes=dict(found.forecast.disk) if found.forecast else {},
        gpu_memory_bytes=tuple(found.gpu.to_dict()) if found.gpu else (),
        gpu_memory_lines=tuple(line for table in (found.gpu, found.servers) if table for line in table.lines()),
        server_memory=found.servers.to_dict() if found.servers else {},
        machine={"memory_total": found.memory.total if found.memory else 0, "disk_free": found.free_disk or 0},
        warnings=tuple(found.warnings),
    )


def _components(config: RootConfig) -> dict[str, str]:
    components = {
        group: getattr(config, group)._target_ for group in ("algorithm", "trainer", "rollout", "gateway", "cluster")
    }
    components["engine"] = config.rollout.engine if not config.rollout.engine_urls else str(config.rollout.engine_urls)
    components |= {"agent": config.agent.import_path, "sandbox": config.sandbox.import_path}
    components |= {f"reward {name}": reward._target_ for name, reward in config.reward.items()}
    return components | {f"logger {name}": logger._target_ for name, logger in config.logger.items()}


def _seconds(config: RootConfig, key: str) -> float:
    group, name = key.split(".")
    return float(getattr(getattr(config, group), name))


def _model_words(model: Mapping[str, Any]) -> str:
    logits = "fp32" if model["fp32_logits"] else "the weights' dtype"
    return f"{model['folder']}, {_count(model['num_parameters'])} parameters, final logits in {logits}"


def _batch_words(batch: Mapping[str, int]) -> str:
    return (
        f"{batch['tasks_per_iteration']} tasks x {batch['group_size']} attempts = {batch['attempts_per_iteration']} an "
        f"iteration, {batch['iterations']} iterations, {batch['training_attempts']} to train on, "
        f"{batch['evaluation_attempts']} to evaluate"
    )


def _room_words(parts: Mapping[str, int], there: int, where: str) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {gib(count)}" for name, count in largest)
    return f"{gib(sum(parts.values()))} needed ({named}), {gib(there)} {where}"


def _count(parameters: int | None) -> str:
    return f"{parameters:,}" if parameters is not None else "an unknown number of"
