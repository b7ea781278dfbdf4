"""What is Hydra's own of the command line: its flags, and its main, which prints configs, completes and runs sweeps.

In: arguments. Out: the flags, or an exit code. Composing without its main is rl360.config.compose's, which flags mean
what for `rl360 run` and `check` is rl360.cli's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags, whole: abbreviated, `--experiment=x` would mean --experimental-rerun and start the default run.

    Raises ConfigError with every argument that is no flag and no override.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False
    parsed, unknown = parser.parse_known_args(list(arguments))
    problems = [_unknown_argument(argument) for argument in unknown]
    # Hydra's main would heed these; ours composes by itself, and the default run would start.
    if parsed.experimental_rerun is not None:
        problems.append("--experimental-rerun: not supported; a run is continued with resume=<its folder>")
    if parsed.config_path is not None:
        problems.append("--config-path: not supported: conf/ of RL360 is needed; add a folder with --config-dir")
    if problems:
        raise ConfigError(problems)
    return parsed


def _unknown_argument(argument: str) -> str:
    if not argument.startswith("-"):
        return f"{argument}: stands behind a flag that keeps it from being read; write flags first, such as -m seed=0,1"
    if "=" in argument:
        return f"{argument}: no such flag; keys are written without dashes: {argument.lstrip('-')}"
    return f"{argument}: no such flag; there are: -m, --cfg job, --help, --info, and those of --hydra-help"


def run_hydra(arguments: Sequence[str], task: Callable[[DictConfig], None] | None = None) -> int:
    """Run Hydra's own main on our config folder, `task` for each point. Its `sys.exit` becomes the exit code."""
    import hydra

    from rl360.config.compose import PRIMARY, register_schema
    from rl360.config.locate import conf_folder
    from rl360.config.resolvers import register_resolvers

    def nothing(config: DictConfig) -> None:
        """For the flags that only print."""

    register_resolvers()
    register_schema()
    app = hydra.main(config_path=str(conf_folder()), config_name=PRIMARY, version_base="1.3")(task or nothing)
    before = sys.argv
    sys.argv = [before[0] if Path(before[0]).name.startswith("rl360") else "rl360", *arguments]
    try:
        app()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        sys.argv = before
    return 0
