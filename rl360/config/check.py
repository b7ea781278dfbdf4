"""The second check after composing: every key, type, target and combination, all problems at once.

In: what Hydra composed (or a saved resolved.yaml). Out: `Loaded`: the typed config, or None, and the problems. Files
and the machine are looked at by rl360.config.files; `examine` does both and is what `rl360 check` and `rl360 run` call.
torch, Harbor and transformers are never imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from rl360.config.combinations import combination_problems
from rl360.config.components import entry_problems, target_problems
from rl360.config.compose import Composed
from rl360.config.files import Found, look
from rl360.config.schemas import SCHEMAS, ComposedConfig, RootConfig, schema_of
from rl360.config.walk import Walker

_NOT_OURS = ("hydra", "experiment")


class Loaded(NamedTuple):
    """`config` is None exactly when there are problems."""

    config: RootConfig | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """One point after all checks. `config` is None exactly when there are problems."""

    config: RootConfig | None
    values: Mapping[str, Any]  # what resolved.yaml will hold
    choices: Mapping[str, str]
    found: Found
    problems: tuple[str, ...]


def load(values: Mapping[str, Any] | DictConfig, choices: Mapping[str, str] | None = None) -> Loaded:
    """Check a composed mapping without looking at the machine. choices: the option of each group, for messages."""
    config, problems, _ = _typed(values, choices or {})
    return Loaded(None if problems else config, tuple(problems))


def examine(composed: Composed, run_dir: Path | None = None, resuming: bool = False) -> Examined:
    """Check everything. Problems of composing, of the config and of the machine come together."""
    config, problems, unset = _typed(composed.values, composed.choices, composed.problems)
    found = look(config, run_dir, resuming, unset)
    if not composed.values and composed.problems:  # not even the primary config: the rest would be about defaults
        return Examined(None, composed.values, composed.choices, found, composed.problems)
    problems = [*composed.problems, *problems, *found.problems]
    if composed.values.get("resume") is not None and not resuming:
        problems.append(
            "resume: would not be heeded here; expected it on the command line of rl360 run or check, as in "
            f"rl360 run resume={composed.values['resume']}"
        )
    unique = tuple(dict.fromkeys(line for problem in problems for line in problem.splitlines()))
    return Examined(None if unique else config, composed.values, composed.choices, found, unique)


def _typed(
    values: Mapping[str, Any] | DictConfig, choices: Mapping[str, str], already: tuple[str, ...] = ()
) -> tuple[RootConfig, list[str], frozenset[str]]:
    """The typed config, the problems, and the keys that have no value (empty text stands for them)."""
    plain: Any = OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else values
    schemas = {group: schema_of(group, _target(plain.get(group))) for group in SCHEMAS}
    walker = Walker(_owners(plain, choices), schemas, _elsewhere(schemas))
    outside = "experiment" in plain  # what an experiment's file says is the root's, or it is nobody's
    fitting = walker.section({key: value for key, value in plain.items() if key not in _NOT_OURS}, ComposedConfig)
    problems = list(walker.problems)
    if outside:
        problems.append(
            f"experiment: {choices.get('experiment', 'its file')} does not set the root's keys; expected "
            "`# @package _global_` as the file's very first line"
        )
    prefixes = fitting.get("allow_targets", [])
    sets: dict[str, dict[str, Any]] = {}
    for group in ("reward", "logger"):
        sets[group] = {}
        for name, entry in fitting.pop(group, {}).items():
            problems.extend(entry_problems(group, name, entry, prefixes))
            if isinstance(entry, Mapping) and isinstance(entry.get("_target_"), str):
                arguments = {key: value for key, value in entry.items() if key != "_target_"}
                sets[group][name] = {"_target_": entry["_target_"], "kwargs": arguments}
    root = OmegaConf.structured(RootConfig)
    for group, schema in schemas.items():
        root[group] = OmegaConf.structured(schema)
    merged = OmegaConf.merge(root, fitting, sets)
    unset = frozenset(OmegaConf.missing_keys(merged))
    for key in unset:
        OmegaConf.update(merged, key, "")
    reported = {problem.partition(":")[0] for problem in (*walker.problems, *already)}
    problems.extend(f"{key}: needs a value" for key in sorted(unset - reported))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RootConfig)
    problems.extend(target_problems(config))
    problems.extend(combination_problems(config))
    return config, problems, unset


def _target(section: Any) -> object:
    return section.get("_target_") if isinstance(section, Mapping) else None


def _elsewhere(schemas: Mapping[str, type[Any]]) -> dict[str, dict[str, str]]:
    """Of each section, the keys that only other options of its group have: key -> option."""
    found = {}
    for group, schema in schemas.items():
        own = {f.name for f in fields(schema)}
        found[group] = {
            f.name: option for option, other in SCHEMAS[group].items() for f in fields(other) if f.name not in own
        }
    return found


def _owners(values: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """What to call each section in a message: its chosen option, else the class that it targets."""
    owners = {}
    for key, section in values.items():
        if isinstance(section, Mapping) and isinstance(target := section.get("_target_"), str):
            owners[key] = target.rpartition(".")[2]
        if choices.get(key) not in (None, "None", "default", "none"):
            owners[key] = choices[key]
    return owners
