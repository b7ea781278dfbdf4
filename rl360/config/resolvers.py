"""The resolvers that conf/ may use. Each is a plain function of its arguments and the working folder.

`${rl360_bundled:POOL}`: absolute folder of a bundled task pool. `${rl360_path:RELATIVE}`: absolute path from the
folder where the command runs. `${rl360_models:}`: where `rl360 model fetch` puts models. `${rl360_process:}`: four
digits of this process, for a sweep's folder. All end as plain strings in resolved.yaml: a run does not need them later.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from rl360.config.locate import bundled_tasks
from rl360.config.run_folder import process_id


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
