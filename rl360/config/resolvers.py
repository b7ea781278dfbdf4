"""The resolvers that conf/ may use. Each is a plain function of its arguments and the working folder.

`${rl360_bundled:POOL}`: absolute folder of a bundled task pool. `${rl360_path:RELATIVE}`: absolute path from the
folder where the command runs. `${rl360_models:}`: where `rl360 model fetch` puts models. `${rl360_process:}`: four
digits of this process, for a sweep's folder. All end as plain strings in resolved.yaml: a run does not need them later.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl360.config.locate import bundled_tasks
from rl360.config.run_folder import process_id

# Keys that hold a path; sandbox.base besides, where it is one.
_PATHS = (
    *("model.path", "tasks.path", "evaluation.tasks.path", "output_dir"),
    *("paths.models", "paths.cache", "paths.outputs"),
)


def absolute(path: str) -> str:
    """`path` made absolute from the working folder, with ~ expanded where that user has a home; links are kept."""
    try:
        return str(Path.cwd() / Path(path).expanduser())
    except RuntimeError:
        return str(Path.cwd() / path)


def models_folder() -> str:
    """Where `rl360 model fetch` puts models."""
    from rl360.models.fetch import default_models_dir

    return str(default_models_dir())


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf. May be called again."""
    OmegaConf.register_new_resolver("rl360_bundled", lambda pool: str(bundled_tasks(pool)), replace=True)
    OmegaConf.register_new_resolver("rl360_models", models_folder, replace=True)
    OmegaConf.register_new_resolver("rl360_process", process_id, replace=True)
    OmegaConf.register_new_resolver("rl360_path", absolute, replace=True)


def with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """A run is continued, and its processes may run, in another folder than the one where the command was given."""

    def at(node: Any, keys: tuple[str, ...]) -> Any:
        if not keys:
            return absolute(node) if isinstance(node, str) and node and node != "???" else node
        if not isinstance(node, dict) or keys[0] not in node:
            return node
        return {**node, keys[0]: at(node[keys[0]], keys[1:])}

    for path in _PATHS:
        values = at(values, tuple(path.split(".")))
    base = values.get("sandbox", {}).get("base") if isinstance(values.get("sandbox"), dict) else None
    return at(values, ("sandbox", "base")) if isinstance(base, str) and os.sep in base else values
