"""From command-line overrides to one plain mapping, with everything that Hydra would stop on reported at once.

In: overrides as `rl360 run` takes them. Out: `Composed`: the mapping, which option each group got, and the problems.
Hydra stops at its first error, so composing is done here with an untyped schema node, each override is looked at by
itself first, and what still makes Hydra fail is taken out until the rest composes. Whether keys and values make sense
is left to rl360.config.check.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl360.config.locate import conf_folder
from rl360.config.names import suggestion
from rl360.config.resolvers import register_resolvers, with_absolute_paths
from rl360.config.schemas import SCHEMAS, ComposedConfig
from rl360.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

PRIMARY = "run"
_SCHEMA = "schema"  # the name that conf/run.yaml's defaults list uses


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line asks to compose."""

    overrides: tuple[str, ...] = ()
    config_name: str = PRIMARY
    config_dir: Path | None = None  # a further folder of configs, before ours
    multirun: bool = False

    @staticmethod
    def from_arguments(arguments: Namespace) -> Request:
        """From what Hydra's own argument parser read."""
        return Request(
            overrides=tuple(arguments.overrides),
            config_name=arguments.config_name or PRIMARY,
            config_dir=Path(arguments.config_dir).absolute() if arguments.config_dir else None,
            multirun=bool(arguments.multirun),
        )


@dataclass(frozen=True, slots=True)
class Composed:
    """One point: the mapping without interpolations, and what did not compose."""

    values: Mapping[str, Any]
    choices: Mapping[str, str] = field(default_factory=dict)  # group -> chosen option
    problems: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def register_schema(typed: bool = True) -> None:
    """Put the schemas where conf/run.yaml and the options find them; untyped, they give the defaults only."""
    schemas: dict[str, Any] = {_SCHEMA: ComposedConfig}
    for group, options in SCHEMAS.items():
        schemas |= {f"{_SCHEMA}_{group}_{option}": schema for option, schema in options.items()}
    for name, schema in schemas.items():
        node = schema if typed else OmegaConf.to_container(OmegaConf.structured(schema), resolve=False)
        ConfigStore.instance().store(name, node, provider="rl360")


def compose(request: Request) -> Composed:
    """Compose one run. Never raises for what the user wrote; see `Composed.problems`."""
    with _loader(request) as loader:
        return _compose(loader, request, request.overrides)


def compose_points(request: Request) -> list[Composed]:
    """Compose every point of a multirun: the grid of the sweep file and of the command line."""
    with _loader(request) as loader:
        primary = _load(loader, request, [], RunMode.MULTIRUN)
        if isinstance(primary, str):
            return [Composed({}, problems=(primary,))]
        params = OmegaConf.select(primary, "hydra.sweeper.params") or {}
        arguments = [f"{key}={value}" for key, value in params.items()] + list(request.overrides)
        grid: dict[str, list[str]] = {}
        problems = []
        for text in arguments:
            override = _parsed(loader, text)
            if isinstance(override, str):
                problems.append(override)
            elif override.is_discrete_sweep():
                key = override.get_key_element()
                grid[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            else:
                grid[override.get_key_element()] = [text]
        combinations = list(itertools.product(*grid.values()))
        problems += [
            f"{key}: not in the config yet, and hydra.sweeper.params has to say so; expected +{key}"
            for key in params
            if _is_new(loader, request, combinations[0], str(key))
        ]
        points = [_compose(loader, request, point) for point in combinations]
    if problems:
        points[0] = replace(points[0], problems=(*problems, *points[0].problems))
    return points


def is_multirun(request: Request) -> bool:
    """Whether Hydra would run several points: asked with -m, or by the primary config's hydra.mode."""
    if request.multirun or request.config_name == PRIMARY:
        return request.multirun
    with _loader(request) as loader:
        primary = _load(loader, request, [], RunMode.MULTIRUN)
    return not isinstance(primary, str) and primary.hydra.mode == RunMode.MULTIRUN


def sweep_folder(request: Request) -> Path | None:
    """Where Hydra puts a multirun; None where that cannot be said, which is reported elsewhere."""
    with _loader(request) as loader:
        read = {text: _parsed(loader, text) for text in request.overrides}
        single = [text for text, one in read.items() if not isinstance(one, str) and not one.is_sweep_override()]
        primary = _load(loader, request, single, RunMode.MULTIRUN)
        try:
            return None if isinstance(primary, str) else Path(str(primary.hydra.sweep.dir))
        except OmegaConfBaseException:
            return None


def from_config(config: DictConfig, choices: Mapping[str, Any], overrides: Sequence[str] = ()) -> Composed:
    """What Hydra composed itself, as it hands it to the task function."""
    values, unresolved = _resolved(config)
    values = with_absolute_paths(values)
    return Composed(values, {str(k): str(v) for k, v in choices.items()}, tuple(unresolved), tuple(overrides))


def lenient_overrides(request: Request) -> dict[str, str]:
    """Map the text of each override to one that also composes when its key is new, as under agent.kwargs."""
    with _loader(request) as loader:
        read = {text: _parsed(loader, text) for text in request.overrides}
        return {
            text: text if isinstance(override, str) else _lenient(loader, request, override, text)
            for text, override in read.items()
        }


def governed_keys(request: Request) -> dict[str, str]:
    """Map each override's text to the config path that it sets; a group's own package, `` for an experiment."""
    with _loader(request) as loader:
        keys = {}
        for text in request.overrides:
            override = _parsed(loader, text)
            if not isinstance(override, str):
                name = override.key_or_group
                keys[text] = "" if name == "experiment" else name.replace("/", ".")
        return keys


@contextmanager
def _loader(request: Request) -> Iterator[ConfigLoader]:
    register_resolvers()
    search_path = create_config_search_path(str(conf_folder()))
    if request.config_dir is not None:
        if not request.config_dir.is_dir():
            raise ConfigError(f"--config-dir: no folder {request.config_dir}")
        search_path.prepend(
            "command-line", f"file://{request.config_dir}", anchor=SearchPathQuery(provider="schema", path=None)
        )
    register_schema(typed=False)
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="rl360", config_search_path=search_path).config_loader
    finally:
        GlobalHydra.instance().clear()
        register_schema(typed=True)


def _parsed(loader: ConfigLoader, text: str) -> Override | str:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        return f"{text}: cannot be read as key=value ({_first_line(error)})"
    override.config_loader = loader  # for glob()
    return override


def _compose(loader: ConfigLoader, request: Request, overrides: Sequence[str]) -> Composed:
    problems: list[str] = []
    usable: list[str] = []
    for text in overrides:
        override = _parsed(loader, text)
        if isinstance(override, str):
            problems.append(override)
        elif problem := _override_problem(loader, request, override):
            problems.append(problem)
        else:
            usable.append(_lenient(loader, request, override, text))
    loaded = _load(loader, request, usable, RunMode.RUN)
    config: DictConfig | None
    if isinstance(loaded, str):
        config, culprits = _without_culprits(loader, request, usable, loaded)
        problems.extend(culprits)
    else:
        config = loaded
    if config is None:
        return Composed({}, {}, tuple(problems), tuple(overrides))
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items()}
    values, unresolved = _resolved(config)
    values = with_absolute_paths(values)
    return Composed(values, choices, (*problems, *unresolved), tuple(overrides))


def _override_problem(loader: ConfigLoader, request: Request, override: Override) -> str | None:
    """What is wrong with one override by itself; keys and values are left to the schema."""
    name = override.key_or_group
    if name == "hydra.searchpath":
        return _searchpath_problem(override)
    if name == "hydra.job.chdir" and override.value() is True:
        return "hydra.job.chdir: true would look for relative paths in each point's own folder; expected false"
    if name == "hydra" or name.startswith(("hydra.", "hydra/")):
        return None
    if override.is_sweep_override():
        return f"{override.input_line}: several values for one run; add -m to run each of them"
    options = _options(loader, request, name)
    if not options:
        if "/" in name or override.package is not None:
            groups = loader.get_group_options("", ObjectType.GROUP, request.config_name, _search_paths(request))
            return f"{name}: no such group{suggestion(name, groups)}"
        return None
    if override.is_delete():
        return None
    value = override.value()
    chosen = value if isinstance(value, list) else [value]
    unknown = [str(option) for option in chosen if option is not None and str(option) not in options]
    if unknown:
        return "\n".join(f"{name}={option}: no such option{suggestion(option, options)}" for option in unknown)
    return None


def _options(loader: ConfigLoader, request: Request, group: str) -> list[str]:
    if "." in group:
        return []
    return loader.get_group_options(group, ObjectType.CONFIG, request.config_name, _search_paths(request))


def _search_paths(request: Request) -> list[str]:
    """The overrides that add a site's own folders: they decide which options there are."""
    texts = [text for text in request.overrides if text.lstrip("+").startswith("hydra.searchpath=")]
    return [text for text in texts if _usable_searchpath(text)]


def _usable_searchpath(text: str) -> bool:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return _searchpath_problem(override) is None


def _searchpath_problem(override: Override) -> str | None:
    """Hydra warns of a folder that is not there, and goes on without a site's own options."""
    folders = override.value()
    if not isinstance(folders, list):
        return f"hydra.searchpath: {folders!r} is no list; expected 'hydra.searchpath=[file://<folder>]', in quotes"
    missing = [str(f) for f in folders if "pkg://" not in str(f) and not Path(str(f).removeprefix("file://")).is_dir()]
    return f"hydra.searchpath: no folder {', '.join(missing)} from {Path.cwd()}" if missing else None


def _lenient(loader: ConfigLoader, request: Request, override: Override, text: str) -> str:
    """A value override that also composes when its key is unknown: the schema walk names the key later."""
    name = override.key_or_group
    sets_value = override.type in (OverrideType.CHANGE, OverrideType.ADD) and not name.startswith("hydra.")
    return "++" + text.lstrip("+") if sets_value and not _options(loader, request, name) else text


def _is_new(loader: ConfigLoader, request: Request, point: Sequence[str], key: str) -> bool:
    """Whether a study's key sets what the rest of a point does not have: Hydra then wants a plus before it.

    Keys that are unknown everywhere are left to the schema; here are those of sets and named entries.
    """
    if not key.startswith(("agent.kwargs.", "sandbox.kwargs.", "reward.", "logger.")):
        return False
    others = [text for text in point if text.partition("=")[0] != key]
    read = {text: _parsed(loader, text) for text in others}
    usable = [_lenient(loader, request, one, text) for text, one in read.items() if not isinstance(one, str)]
    config = _load(loader, request, usable, RunMode.RUN)
    section, _, name = key.rpartition(".")
    node = None if isinstance(config, str) else OmegaConf.select(config, section)
    return isinstance(node, DictConfig) and name not in node


def _load(loader: ConfigLoader, request: Request, overrides: Sequence[str], mode: RunMode) -> DictConfig | str:
    try:
        return loader.load_configuration(
            request.config_name, list(overrides), run_mode=mode, validate_sweep_overrides=mode is RunMode.RUN
        )
    except YAMLError as error:
        return f"a config file is not YAML: {' '.join(str(error).split())}"
    except (HydraException, OmegaConfBaseException, ConfigError, OSError, ValueError, TypeError) as error:
        return _readable(error, request)


def _without_culprits(
    loader: ConfigLoader, request: Request, overrides: Sequence[str], message: str
) -> tuple[DictConfig | None, list[str]]:
    """Add overrides one at a time; those that make Hydra fail are the problems. None: it fails without any, too."""
    config = _load(loader, request, [], RunMode.RUN)
    if isinstance(config, str):
        return None, [config]
    kept: list[str] = []
    problems = []
    for text in overrides:
        attempt = _load(loader, request, [*kept, text], RunMode.RUN)
        if isinstance(attempt, str):
            problems.append(f"{text.lstrip('+')}: {attempt}")
        else:
            kept.append(text)
            config = attempt
    return config, problems or [message]


def _resolved(config: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """The experiment's part with interpolations replaced. One that cannot be is a problem and is left out."""
    problems: list[str] = []

    def walk(node: Any, path: str) -> Any:
        if OmegaConf.is_dict(node):
            entries = {str(k): child(node, k, f"{path}.{k}" if path else str(k)) for k in node}
            return {k: entry for k, entry in entries.items() if entry is not _DROP}
        if OmegaConf.is_list(node):
            kept_items = (child(node, i, f"{path}[{i}]") for i in range(len(node)))
            return [item for item in kept_items if item is not _DROP]
        return node

    def child(node: Any, key: Any, path: str) -> Any:
        if OmegaConf.is_missing(node, key):
            return "???"
        raw = node._get_node(key)._value()
        if isinstance(raw, str) and "${oc.env:" in raw and SECRET_KEY.search(path):
            problems.append(f"{path}: would store a secret; name the variable instead, as in gateway.api_key_env")
            return _DROP
        try:
            return walk(node[key], path)
        except (OmegaConfBaseException, ConfigError) as error:
            problems.append(f"{path}: {_RAISED_INSIDE.sub('', _first_line(error))}")
            return _DROP

    values = {str(key): child(config, key, str(key)) for key in config if key != "hydra"}
    return {key: value for key, value in values.items() if value is not _DROP}, problems


_DROP = object()
_RAISED_INSIDE = re.compile(r"^\w+ raised while resolving interpolation: ")
SECRET_KEY = re.compile(r"(^|[._])(api_?key|key|token|secret|password|credential)s?$", re.IGNORECASE)


def _first_line(error: BaseException | str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _readable(error: Exception, request: Request) -> str:
    """Hydra's message in one line, without its advice about its own flags."""
    text = str(error)
    if match := re.search(r"Cannot find primary config '([^']*)'", text):
        folders = [str(conf_folder()), *([str(request.config_dir)] if request.config_dir else [])]
        known = [p.stem for folder in folders for p in Path(folder).glob("*.yaml")]
        chosen = conf_folder() / "experiment" / f"{match[1]}.yaml"
        hint = (
            f"; an experiment is chosen with experiment={match[1]}" if chosen.is_file() else suggestion(match[1], known)
        )
        return f"--config-name {match[1]}: no such file in {os.pathsep.join(folders)}{hint}"
    if match := re.search(r"In '([^']*)': Could not find '([^']*)'", text):
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        return f"no such option {match[2]}{suggestion(match[2].rpartition('/')[2], options)}"
    if match := re.search(r"In '([^']*)': Could not override '([^']*)'", text):
        if "@" in match[2]:  # Hydra looked inside the file's own group
            hint = "expected `# @package _global_` as its very first line"
            return f"{match[1]}.yaml overrides {match[2].partition('@')[0]} from inside its own group; {hint}"
        groups = [folder.name for folder in conf_folder().iterdir() if folder.is_dir()]
        return f"{match[1]}.yaml overrides {match[2]}, which is no group{suggestion(match[2], groups)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else _first_line(error)
