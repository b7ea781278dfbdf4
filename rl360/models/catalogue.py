"""What conf/model says of a model, for commands that need no experiment: fetch, prepare.

In: a short name. Out: the YAML's values; a name without a file is answered with the names there are. Composing an
experiment, in which anything can be overridden, is rl360.config.compose's.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from rl360.config.locate import conf_folder
from rl360.config.names import suggestion
from rl360.errors import ConfigError


def shipped_names() -> list[str]:
    """The options of conf/model."""
    return sorted(path.stem for path in (conf_folder() / "model").glob("*.yaml"))


def shipped_model(name: str) -> dict[str, Any]:
    """The values of conf/model/<name>.yaml. Raises `ConfigError` for a name without one."""
    names = shipped_names()
    if name not in names:
        raise ConfigError(f"model.name: {name}: not in conf/model{suggestion(name, names)}")
    values = OmegaConf.to_container(OmegaConf.load(conf_folder() / "model" / f"{name}.yaml"))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
