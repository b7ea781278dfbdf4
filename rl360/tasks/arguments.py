"""What the commands of `rl360 tasks` share: their pools, overrides and kinds of arguments.

In: words of a command line. Out: paths, configs, numbers. Raises ConfigError or TaskError for what the user wrote
wrongly. Left to others: the commands (cli.py, trial_commands.py).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rl360.config.names import suggestion
from rl360.errors import ConfigError, TaskError
from rl360.tasks.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from rl360.config.schemas import RootConfig

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2
_OVERRIDE = re.compile(r"^(\+{0,2}|~)[\w./@-]+=")


def find_pool(text: str) -> Path:
    """A folder or manifest by its path, else a bundled pool by its name. Raises TaskError with what there is."""
    from rl360.config.locate import bundled_tasks

    path = Path(text).expanduser()
    if path.exists():
        return path.absolute()
    try:
        return bundled_tasks(text)
    except ConfigError as error:
        hint = suggestion(text, bundled_pools())
        raise TaskError(f"{text}: no such folder or manifest, and no bundled pool{hint}") from error


def bundled_pools() -> dict[str, Path]:
    """The manifests that ship with the package, by the name that `tasks list` and its kin take."""
    from rl360.config.locate import bundled_tasks

    pools = {}
    root = bundled_tasks("small_coding").parent
    for folder in sorted(path for path in root.iterdir() if (path / MANIFEST_NAME).is_file()):
        for manifest in sorted(folder.glob("*.jsonl"), key=lambda path: (path.name != MANIFEST_NAME, path.name)):
            whole = manifest.name == MANIFEST_NAME
            pools[folder.name if whole else f"{folder.name}/{manifest.name}"] = manifest
    return pools


def config_of(pool: Path, overrides: Sequence[str]) -> RootConfig:
    """The settings that trials run with: those of `rl360 run` with the same overrides. No model is looked for."""
    from rl360.config.check import load
    from rl360.config.compose import Request, compose

    quoted = str(pool).replace("\\", "\\\\").replace("'", "\\'")
    composed = compose(Request((*overrides, f"tasks.path='{quoted}'")))
    loaded = load(composed.values, composed.choices)
    if problems := [*composed.problems, *loaded.problems]:
        raise ConfigError(dict.fromkeys(problems))
    assert loaded.config is not None
    return loaded.config


def examined_config(overrides: Sequence[str]) -> RootConfig:
    """As `rl360 check`, but for what only training needs: evaluation, batch size, room for the optimizer."""
    from rl360.config.check import examine
    from rl360.config.compose import Request, compose

    given = {override.partition("=")[0] for override in overrides}
    training_only = {"evaluation": "evaluation=none", "tasks_per_iteration": "tasks_per_iteration=1"}
    added = [text for key, text in training_only.items() if key not in given]
    composed = compose(Request((*added, *overrides)))
    examined = examine(composed)
    if problems := [p for p in examined.problems if not p.startswith(("memory:", "disk:"))]:
        raise ConfigError(problems)
    if examined.config is not None:
        return examined.config
    from rl360.config.check import load

    config = load(composed.values, composed.choices).config
    assert config is not None
    return config


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths, overrides). What exists is a path, whatever it looks like."""
    overrides = [a for a in arguments if _OVERRIDE.match(a) and not Path(a).exists()]
    return [a for a in arguments if a not in overrides], overrides


def parser_of(name: str, command: Callable[..., int]) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"rl360 tasks {name}", description=command.__doc__)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; expected at least 1")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}; expected a rate from 0 to 1")
    return value


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def kept_or_temporary(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()
        return
    with TemporaryDirectory(prefix="rl360-tasks-", ignore_cleanup_errors=True) as name:
        yield Path(name)
