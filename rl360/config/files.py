"""What the experiment needs of this machine: model folder, tasks, output, sandboxes, room. Loads no model.

In: a typed config. Out: `Found`: facts for the plan, problems that would end a run, warnings that would not. Nothing is
written but a probe folder that is removed at once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.config.combinations import combination_warnings
from rl360.config.forecast import GIB, MIB, Forecast, ModelShape, forecast
from rl360.config.forecast_engine import DRIVER_BYTES, is_sglang
from rl360.config.forecast_sharing import ServingForecast
from rl360.config.forecast_trainer import trainer_gpus
from rl360.config.gateway import gateway_machine_problems
from rl360.config.gpu_memory import GpuForecast, gpu_forecast
from rl360.config.megatron import megatron_machine_problems
from rl360.config.one_process import one_process_problems
from rl360.config.schemas import ClusterConfig, MegatronTrainerConfig, ModelConfig, RootConfig, TasksConfig
from rl360.config.serving import serving_warnings
from rl360.config.serving_machine import command_problems, look_at_servers, port_problems, with_servers
from rl360.diagnostics.machine import Gpu, Memory, free_disk_bytes, gpus, memory, write_problem
from rl360.errors import ConfigError, TaskError
from rl360.models.architecture import malformed, sizes_missing
from rl360.models.inspection import NUM_PARAMETERS
from rl360.types import Task

if TYPE_CHECKING:
    from rl360.sandboxes.abilities import Ability

LOCAL_SANDBOX, DOCKER_SANDBOX = "rl360.sandboxes.local:", "rl360.sandboxes.docker:"
DAYTONA_SANDBOX = "rl360.sandboxes.daytona:"


@dataclass(slots=True)
class Found:
    """Filled while the checks run; read by the plan."""

    model_dir: Path
    num_parameters: int | None = None
    training: list[Task] = field(default_factory=list)
    evaluation: list[Task] = field(default_factory=list)
    shape: ModelShape | None = None
    forecast: Forecast | None = None
    gpu: GpuForecast | None = None  # of a trainer that spreads over GPUs
    servers: ServingForecast | None = None  # of SGLang servers that the run starts
    memory: Memory | None = None
    free_disk: int | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def model_folder(config: RootConfig) -> Path:
    """Where the checkpoint is: model.path, else paths.models/<name>."""
    return Path(config.model.path) if config.model.path else Path(config.paths.models) / config.model.name


def look(config: RootConfig, run_dir: Path | None = None, resuming: bool = False, unset: Collection[str] = ()) -> Found:
    """Run every check of files and of the machine.

    run_dir: the run's folder, when it is known already. unset: keys without a value, reported elsewhere.
    """
    found = Found(model_dir=model_folder(config))
    if not {"model.name", "model.path"} & set(unset):
        _model(config, found)
    if found.shape is None:
        _expected_shape(config, found)
    _gpus(config, found)
    found.problems.extend(one_process_problems(config, found.shape, lambda: len(visible(gpus()))))
    _tasks(config, found)
    _output(config, found, run_dir, resuming)
    _sandbox(config, found)
    found.problems.extend(gateway_machine_problems(config))
    found.problems.extend(megatron_machine_problems(config))
    found.warnings.extend([*combination_warnings(config), *serving_warnings(config)])
    _room(config, found)
    return found


def _model(config: RootConfig, found: Found) -> None:
    folder = found.model_dir
    key = "model.path" if config.model.path else "model"
    if not folder.is_dir():
        hint = (
            f"; try: rl360 model fetch {config.model.name}"
            if config.model.source
            else f"; try: rl360 model tiny --family {config.model.name.removeprefix('tiny_')}"
            if config.model.name.startswith("tiny_")
            else "; give one with model.path=<folder>"
        )
        found.problems.append(f"{key}: no model folder {folder}{hint}")
        return
    found.problems.extend(f"{key}: {problem}" for problem in _folder_problems(folder, config.model))
    try:
        shape = ModelShape.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except KeyError as error:
        found.problems.append(f"{key}: {folder / 'config.json'} has no {error.args[0]}; expected a Llama-like decoder")
    except (OSError, ValueError, TypeError, ArithmeticError):
        return  # _folder_problems has named it
    else:
        found.shape = shape
        found.num_parameters = shape.num_parameters
        found.forecast = forecast(shape, config)


def _expected_shape(config: RootConfig, found: Found) -> None:
    """Without the folder, what the model's YAML says of it is enough for a forecast of the GPUs, if it can be true."""
    expect = config.model.expect or {}
    if problems := [*malformed(expect, "model.expect"), *sizes_missing(expect, "model.expect", only=expect)]:
        found.problems.extend(problems)
        return
    try:
        shape = ModelShape.from_hf(expect)
    except (KeyError, TypeError, ValueError):
        return
    counted, said = shape.num_parameters, expect.get(NUM_PARAMETERS)
    if said is not None and counted != said:
        found.problems.append(
            f"model.expect: its shapes give {counted:,} parameters, and {NUM_PARAMETERS} is {said}; expected the same"
        )
        return
    found.shape = shape


def _gpus(config: RootConfig, found: Found) -> None:
    """Whether layouts of a Megatron trainer and of servers divide the model, fit the cards, and these are there."""
    ranks = isinstance(config.trainer, MegatronTrainerConfig)
    real_ranks = ranks and trainer_gpus(config) > 0
    here = config.cluster._target_ == ClusterConfig._target_ and (real_ranks or is_sglang(config))
    cards = visible(gpus()) if here else []
    known_gib = config.cluster.gpu_memory_gib
    capacity = min((card.memory_mib * MIB - DRIVER_BYTES for card in cards), default=None)
    if known_gib is not None:
        capacity = int(known_gib * GIB)
    if ranks:
        _ranks(config, found, cards if here and real_ranks else None, capacity)
    if config.cluster._target_ == ClusterConfig._target_:
        found.problems.extend([*command_problems(config), *port_problems(config)])
    if is_sglang(config):
        trainer_fits = found.gpu is None or found.gpu.fits
        looked = look_at_servers(config, found.shape, capacity, len(cards) if here else None, trainer_fits)
        found.servers = looked.forecast
        found.problems.extend(problem for problem in looked.problems if problem not in found.problems)
        found.warnings.extend(looked.warnings)
        if found.forecast is not None and found.servers is not None:
            found.forecast = with_servers(found.forecast, found.servers)


def visible(cards: Sequence[Gpu]) -> list[Gpu]:
    """Of the machine's cards those that CUDA_VISIBLE_DEVICES leaves to this process, as CUDA reads it.

    The first name that is none (-1, NoDevFiles of Slurm, a number too large) ends the list, and one given twice makes
    it empty. Which card a UUID is nobody asked: it counts as the smallest.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None or not cards:
        return list(cards)
    found: dict[str, Gpu] = {}
    for name in (part.strip() for part in names.split(",")):
        if name in found:
            return []
        if len(found) == len(cards):
            break
        if name.isdigit() and int(name) < len(cards):
            found[name] = cards[int(name)]
        elif name.startswith(("GPU-", "MIG-")):
            found[name] = min(cards, key=lambda card: card.memory_mib)
        else:
            break
    return list(found.values())


def _ranks(config: RootConfig, found: Found, cards: Sequence[Gpu] | None, capacity: int | None) -> None:
    """Of Megatron's ranks. cards: this machine's; None: the ranks run elsewhere, or need none."""
    trainer = config.trainer
    assert isinstance(trainer, MegatronTrainerConfig)
    if cards is not None and len(cards) < trainer.num_gpus:
        shown = " that CUDA_VISIBLE_DEVICES shows" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        found.problems.append(
            f"trainer.num_gpus: {trainer.num_gpus}, and this machine has {len(cards) or 'no'} CUDA GPU"
            f"{'' if len(cards) == 1 else 's'}{shown}; Megatron's ranks need one each; try trainer=torch or a cluster"
        )
    if found.shape is None:
        return
    try:
        found.gpu = gpu_forecast(config, found.shape, capacity)
    except ConfigError as error:
        found.problems.extend(error.problems)
        return
    if (message := found.gpu.message()) is not None:
        certain = not found.gpu.fits and not found.gpu.assumed
        (found.problems if certain else found.warnings).append(message)


def _folder_problems(folder: Path, model: ModelConfig) -> list[str]:
    """Files first; then whether they are the chosen model, which a folder without them cannot say."""
    from rl360.models.fetch import folder_problems
    from rl360.models.inspection import CONFIG_FILE, checkpoint_differences, config_differences, read_raw_config

    if model.random_init:
        missing = [
            f"{folder}: no {name}" for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()
        ]
    else:
        missing = folder_problems(folder)
    if missing:
        return missing
    try:
        others = config_differences(read_raw_config(folder), model.expect or {}, str(folder / CONFIG_FILE))
    except ConfigError as error:
        return error.problems
    if others:  # a wrong model differs in everything: the first says enough
        more = f", and {len(others) - 1} more keys differ" if len(others) > 1 else ""
        return [f"{others[0]} of {model.name}{more}; choose the model that it is, or take any with model.expect=null"]
    return checkpoint_differences(folder, model.expect, weights=not model.random_init)


def _tasks(config: RootConfig, found: Found) -> None:
    found.training = _load(config.tasks, "tasks", found)
    wanted = config.evaluation.tasks
    if wanted is not None and config.evaluation.every > 0:
        found.evaluation = _load(wanted, "evaluation.tasks", found)
    if found.training and config.tasks_per_iteration > len(found.training):
        found.problems.append(
            f"tasks_per_iteration: {config.tasks_per_iteration}, but tasks has {len(found.training)}; a batch of "
            f"different tasks cannot be formed; expected at most {len(found.training)}"
        )
    held_out = {key for task in found.evaluation for key in (task.task_id, task.content_hash)}
    if names := [task.task_id for task in found.training if {task.task_id, task.content_hash} & held_out]:
        found.problems.append(
            f"evaluation.tasks: also trained on: {_some(names)}; expected other tasks, see include and exclude"
        )


def _load(tasks: TasksConfig, key: str, found: Found) -> list[Task]:
    from rl360.tasks.manifest import load_tasks

    if not tasks.path:
        return []  # reported as a key without a value
    path = Path(tasks.path)
    if not path.exists():
        found.problems.append(f"{key}.path: no folder {path}; expected one with harbor_records.jsonl and task folders")
        return []
    for name, ids in (("include", tasks.include), ("exclude", tasks.exclude)):
        if twice := [task_id for task_id, count in Counter(ids).items() if count > 1]:
            found.problems.append(f"{key}.{name}: the same id twice: {_some(twice)}")
    try:
        return load_tasks(path, tasks.include, tasks.exclude)
    except TaskError as error:
        found.problems.extend(
            f"{key}{problem.removeprefix('tasks')}" if problem.startswith("tasks") else f"{key}: {problem}"
            for problem in error.problems
        )
        return []


def _some(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _output(config: RootConfig, found: Found, run_dir: Path | None, resuming: bool) -> None:
    folder = run_dir or Path(config.output_dir or config.paths.outputs)
    key = "output_dir" if config.output_dir else "paths.outputs"
    if problem := write_problem(folder):
        found.problems.append(f"{key}: {problem}; expected a folder that can be written, such as {key}=/tmp/rl360")
    elif not resuming and config.output_dir and (folder / "resolved.yaml").exists():
        found.problems.append(f"output_dir: {folder} already holds a run; continue it with resume={folder}")
    if problem := write_problem(Path(config.paths.cache)):
        found.problems.append(f"paths.cache: {problem}")


def _sandbox(config: RootConfig, found: Found) -> None:
    """What the chosen kind of sandbox lacks on this machine. Other kinds than ours are not known here."""
    path, kwargs = config.sandbox.import_path, config.sandbox.kwargs
    if path.startswith(LOCAL_SANDBOX):
        _local_sandbox(config, found)
    elif path.startswith(DOCKER_SANDBOX):
        from rl360.sandboxes.docker.abilities import probe

        _abilities(probe(), found)
    elif path.startswith(DAYTONA_SANDBOX):
        from rl360.sandboxes.daytona.abilities import DEFAULT_KEY_VARIABLE
        from rl360.sandboxes.daytona.abilities import probe as probe_daytona

        _abilities(probe_daytona(kwargs.get("api_key_env") or DEFAULT_KEY_VARIABLE, kwargs.get("api_url")), found)


def _abilities(abilities: Sequence[Ability], found: Found) -> None:
    for a in abilities:
        if not a.ok:
            (found.problems if a.required else found.warnings).append(f"sandbox: {a.name}: {a.detail}; {a.remedy}")


def _local_sandbox(config: RootConfig, found: Found) -> None:
    from rl360.sandboxes.abilities import probe

    _abilities(probe(config.sandbox.unprivileged).abilities, found)
    _dockerfiles(found)
    base = config.sandbox.base
    if base not in ("auto", "host", "debootstrap") and not Path(base).is_dir():
        found.problems.append(f"sandbox.base: no folder {base}; expected auto, host, debootstrap or a folder")


def _dockerfiles(found: Found) -> None:
    """What the local sandbox cannot build of a task's Dockerfile; without one there is nothing to build."""
    from rl360.sandboxes.local.dockerfile import DockerfileError, parse

    for task in {task.task_id: task for task in (*found.training, *found.evaluation)}.values():
        path = task.path / "environment" / "Dockerfile"
        try:
            if path.exists():
                parse(path)
        except (DockerfileError, OSError, ValueError) as error:
            found.problems.append(f"task {task.task_id}: {path}: {error}")


def _room(config: RootConfig, found: Found) -> None:
    found.memory = memory()
    found.free_disk = free_disk_bytes(Path(config.output_dir or config.paths.outputs))
    if found.forecast is None:
        return
    need = found.forecast.memory_bytes
    if need > found.memory.total:
        found.problems.append(
            f"memory: {gib(need)} needed ({_largest(found.forecast.memory)}), the machine has "
            f"{gib(found.memory.total)}; try {_smaller(config)}"
        )
    elif need > found.memory.available:
        found.warnings.append(f"memory: {gib(need)} needed, {gib(found.memory.available)} free at the moment")
    if found.forecast.disk_bytes > found.free_disk:
        found.problems.append(
            f"disk: {gib(found.forecast.disk_bytes)} needed ({_largest(found.forecast.disk)}), "
            f"{gib(found.free_disk)} free; try another paths.outputs, a smaller checkpoint.keep_last, or no checkpoint "
            "(checkpoint.every=0 checkpoint.at_end=false)"
        )


def _smaller(config: RootConfig) -> str:
    """What to turn where the machine's memory is not enough."""
    if config.rollout.sglang.colocated:
        return "GPUs of their own for trainer and servers (rollout.sglang.colocated=false), or a smaller model"
    return "a smaller model, trainer.max_tokens_per_gpu or rollout.kv_cache_gib"


def gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _largest(parts: Mapping[str, int], most: int = 3) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {gib(count)}" for name, count in largest)
