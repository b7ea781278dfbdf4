"""The resolvers that conf/ may use. Each is a plain function of its arguments and the working folder.

`${rl360_bundled:POOL}`: absolute folder of a bundled task pool. `${rl360_path:RELATIVE}`: absolute path from the
folder where the command runs. `${rl360_models:}`: where `rl360 model fetch` puts models. All end as plain strings in
resolved.yaml, so a run does not depend on them later.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from rl360.config.locate import bundled_tasks


def absolute(path: str) -> str:
    """`path` made absolute from the working folder, with ~ expanded; links are kept."""
    return str(Path.cwd() / Path(path).expanduser())


def models_folder() -> str:
    """Where `rl360 model fetch` puts models."""
    from rl360.models.fetch import default_models_dir

    return str(default_models_dir())


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf. May be called again."""
    OmegaConf.register_new_resolver("rl360_bundled", lambda pool: str(bundled_tasks(pool)), replace=True)
    OmegaConf.register_new_resolver("rl360_models", models_folder, replace=True)
    OmegaConf.register_new_resolver("rl360_path", absolute, replace=True)
