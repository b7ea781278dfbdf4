"""Where the shipped YAML lies: conf/ and sweeps/ beside the package in a checkout, inside it in a wheel.

In: the place of this file. Out: absolute folders. Which config is chosen there is rl360.config.compose's business.
"""

from __future__ import annotations

from pathlib import Path

import rl360
from rl360.errors import ConfigError

_PACKAGE = Path(rl360.__file__).resolve().parent


def shipped_folder(name: str, marker: str = "*.yaml", package: Path = _PACKAGE) -> Path:
    """Return the folder `name` of a wheel (rl360/<name>), else of a checkout or an editable install (../<name>).

    A folder counts only when a file matches `marker`: an unrelated `conf` beside site-packages is not ours.
    Raises `ConfigError` when neither is there: the installation is broken.
    """
    candidates = [package / name, package.parent / name]
    for folder in candidates:
        if folder.is_dir() and any(folder.glob(marker)):
            return folder
    looked = " and ".join(str(c) for c in candidates)
    raise ConfigError(f"installation: no folder `{name}` with {marker} in {looked}; reinstall rl360")


def conf_folder() -> Path:
    """The folder of Hydra's groups."""
    return shipped_folder("conf", "run.yaml")


def sweeps_folder() -> Path:
    """The folder with one primary config per study."""
    return shipped_folder("sweeps")


def bundled_tasks(pool: str) -> Path:
    """A task pool that ships inside the package: its folder, or one of its manifests as `<folder>/<name>.jsonl`.

    Raises `ConfigError` naming what there is.
    """
    root = _PACKAGE / "tasks" / "bundled"
    place = root / pool
    if not place.exists():
        folder = place.parent if place.suffix else root
        known = sorted(p.name for p in folder.iterdir() if p.name[0] not in "._") if folder.is_dir() else []
        known = [name for name in known if not place.suffix or name.endswith(place.suffix)]
        raise ConfigError(f"rl360_bundled:{pool}: no such bundled task pool; there are: {', '.join(known) or 'none'}")
    return place
