"""Continuing a run: its saved resolved.yaml wins, and only some keys may be given anew.

In: the command line with `resume=<run folder>`. Out: the saved values with the permitted changes, and problems that
name every key that may not change. Restoring weights and state is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl360.config.check import load
from rl360.config.compose import Composed, Request, compose, governed_keys
from rl360.config.files import Found
from rl360.config.resolvers import with_absolute_paths
from rl360.config.run_folder import PLAN, RESOLVED

# Of a trainer: how its work is split and kept, which leaves the gradient what it is but for rounding.
_WHERE_IT_TRAINS = (
    "num_threads",
    "gradient_checkpointing",
    "max_tokens_per_gpu",
    "logprob_chunk_tokens",
    "num_gpus",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "recompute",
    "compile",
    "overlap_grad_reduce",
    "async_checkpoint",
    "step_timeout_s",
    "start_timeout_s",
    "init_method",
)

# Of servers that the run starts: where they are, what they may hold, and how they are watched.
_WHERE_IT_SERVES = (
    "num_servers",
    "tensor_parallel_size",
    "devices",
    "base_port",
    "mem_fraction_static",
    "max_running_requests",
    "start_timeout_s",
    "health_interval_s",
    "health_timeout_s",
    "health_failures",
    "straggler_s",
    "max_restarts",
    "bucket_gib",
    "engines_per_group",
)

# What does not change what is learnt: how long, where, and what is written about it.
RESUMABLE = (
    "iterations",
    "logger",
    "cluster",
    "paths",
    "checkpoint",
    "mismatch",
    "gateway",
    "rollout.concurrency",
    "rollout.num_workers",
    "rollout.engine_urls",
    "rollout.request_timeout_s",
    "rollout.drain_timeout_s",
    "rollout.kv_cache_gib",
    *(f"rollout.sglang.{key}" for key in _WHERE_IT_SERVES),
    *(f"trainer.{key}" for key in _WHERE_IT_TRAINS),
)
# Folders that may be somewhere else now, as on another machine: only as themselves, never by way of a group. Tasks are
# compared by their hashes, a model by its numbers.
_MOVED = ("model.path", "tasks.path", "evaluation.tasks.path")
_WORDS = (
    *(key for key in RESUMABLE if not key.startswith(("trainer.", "rollout.sglang."))),
    f"of rollout.sglang {', '.join(_WHERE_IT_SERVES)}",
    f"of trainer {', '.join(_WHERE_IT_TRAINS)}",
    f"to other copies of the same folders {', '.join(_MOVED)}",
)
_SET_BY_RESUME = ("resume", "output_dir")


def resume_folder(request: Request) -> Path | None:
    """The folder of `resume=...`, absolute; None when the command line has none, or null. As of any key the last."""
    for text in reversed(request.overrides):
        key, _, value = text.lstrip("+").partition("=")
        if key == "resume":
            value = value.strip("'\"")
            return None if value == "null" else Path(value).expanduser().absolute()
    return None


def resumed(request: Request, folder: Path) -> Composed:
    """The saved values with what the command line may change. Never raises; see `Composed.problems`."""
    saved, problem = _saved(folder)
    if problem:
        return Composed({}, problems=(problem,))
    others = tuple(text for text in request.overrides if text.lstrip("+").partition("=")[0] != "resume")
    asked = replace(request, overrides=others)
    fresh = compose(asked) if others else Composed(saved)
    problems = list(fresh.problems)
    saved = with_absolute_paths(saved)  # earlier versions saved them as they were given, and what is given now is not
    values: Any = OmegaConf.create(saved)
    roots = governed_keys(asked) if others else {}
    given = [(text, key) for text, root in roots.items() for key in _differences(saved, fresh.values, root)]
    unknown = _unknown_keys(saved, {key: _get(fresh.values, key) for _, key in given if not _has(saved, key)})
    refused = []
    for text, key in given:
        if key in unknown:
            problems.append(unknown[key])
        elif not _permitted(key) and not (key in _MOVED and roots[text] == key and _get(fresh.values, key)):
            now, before = _get(fresh.values, key), _get(saved, key)
            refused.append(f"{key}: {now!r} ({text}) differs from {before!r} of the saved run")
        elif _has(fresh.values, key):
            OmegaConf.update(values, key, _get(fresh.values, key), merge=False, force_add=True)
        else:  # taken away, as by ~logger.console
            section, _, name = key.rpartition(".")
            (OmegaConf.select(values, section) if section else values).pop(name, None)
    if refused:
        problems += [*refused[:-1], f"{refused[-1]}; on resume only {', '.join(_WORDS)} may change"]
    values["resume"] = values["output_dir"] = str(folder)
    problems.extend(_nothing_left(folder, values.get("iterations")))
    return Composed(OmegaConf.to_container(values), {}, tuple(problems), request.overrides)  # type: ignore[arg-type]


def changed_tasks(folder: Path, found: Found) -> list[str]:
    """Tasks that are not what the run was started with: a resumed run would train on other data unnoticed."""
    try:
        before = json.loads((folder / PLAN).read_text(encoding="utf-8"))["task_hashes"]
    except (OSError, ValueError, KeyError):
        return []
    problems = []
    for purpose, tasks in (("tasks", found.training), ("evaluation.tasks", found.evaluation)):
        now = {task.task_id: task.content_hash for task in tasks}
        then = before.get(purpose, {})
        changed = sorted(task_id for task_id in then.keys() | now.keys() if then.get(task_id) != now.get(task_id))
        if changed and then:
            problems.append(f"{purpose}: changed since the run began: {', '.join(changed)}; expected the same data set")
    return problems


def _saved(folder: Path) -> tuple[dict[str, Any], str | None]:
    path = folder / RESOLVED
    if not path.is_file():
        return {}, f"resume: no {RESOLVED} in {folder}; expected the folder of an earlier run"
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        return {}, f"resume: {path} cannot be read ({type(error).__name__})"
    if not isinstance(saved, dict):
        return {}, f"resume: {path} holds no experiment"
    return {str(key): value for key, value in saved.items()}, None


def _unknown_keys(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Slips among the keys that the command line gives and the saved run does not have: key -> problem."""
    if not new:
        return {}
    values = OmegaConf.create(dict(saved))
    for key, value in new.items():
        OmegaConf.update(values, key, value, merge=False, force_add=True)
    problems = {problem.partition(":")[0]: problem for problem in load(values).problems if ": unknown key" in problem}
    return {key: problem for key, problem in problems.items() if key in new}


def _nothing_left(folder: Path, iterations: Any) -> list[str]:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    done = summary.get("iterations")
    if summary.get("exit_reason") != "finished" or not isinstance(done, int) or not isinstance(iterations, int):
        return []
    if done < iterations:
        return []
    return [f"iterations: {iterations}, and the run has done {done}; give more, such as iterations={done * 2}"]


def _permitted(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in RESUMABLE)


def _differences(saved: Mapping[str, Any], fresh: Mapping[str, Any], root: str) -> list[str]:
    """Paths under `root` whose values differ; a whole permitted subtree counts as one."""
    old, new = (_get(saved, root), _get(fresh, root)) if root else (saved, fresh)
    if isinstance(old, Mapping) and isinstance(new, Mapping) and not (root and _permitted(root)):
        if old.get("_target_") != new.get("_target_"):  # another class: its keys say nothing more
            return [f"{root}._target_"]
        keys = [key for key in (*old, *(k for k in new if k not in old)) if root or key not in _SET_BY_RESUME]
        return [found for key in keys for found in _differences(saved, fresh, f"{root}.{key}" if root else str(key))]
    return [root] if old != new else []


def _has(values: Mapping[str, Any], path: str) -> bool:
    section, _, name = path.rpartition(".")
    found = _get(values, section) if section else values
    return isinstance(found, Mapping) and name in found


def _get(values: Mapping[str, Any], path: str) -> Any:
    node: Any = values
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
