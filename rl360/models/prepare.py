"""`rl360 model prepare`: a K2 Horizon 7B download as a folder that older runtimes can read, the download untouched.

In: the folder of the hub's snapshot. Out: a separate folder, complete or not there at all. Weights and everything else
that does not change are hard links (copies across file systems); three things are written anew:
- config.json: rope_theta at the top and inside rope_parameters, dtype under both of its names, and an auto_map that
  names only the plain configuration beside it (the published one, like its model code, needs transformers 5);
- configuration_k2_horizon.py: rl360.models.k2_horizon_config, which transformers 4 and 5 read;
- tokenizer_config.json: `tokenizer_class` PreTrainedTokenizerFast instead of transformers 5's TokenizersBackend.
model_type, architectures, vocabulary and chat template stay as they are. Left to others: fetching (rl360.models.fetch),
Megatron's format (`rl360 model convert`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl360.errors import CheckpointError, ConfigError
from rl360.models.architecture import rope_thetas
from rl360.models.catalogue import shipped_model
from rl360.models.fetch import MANIFEST_FILE, folder_lock, folder_problems, staging_folder
from rl360.models.inspection import CONFIG_FILE, checkpoint_differences, read_raw_config

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CONFIGURATION_FILE = "configuration_k2_horizon.py"
CONFIG_CLASS = "K2HorizonConfig"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# The only tokenizer classes that a byte-level tokenizer.json of this family was published under.
KNOWN_TOKENIZER_CLASSES = ("TokenizersBackend", TOKENIZER_CLASS)
NAME = "k2_horizon_7b"


def prepare(
    source: Path | str,
    folder: Path | str,
    expect: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Make `folder` from the download `source` and return it. `expect`: None: what conf/model says of the 7B.

    Raises `ConfigError` when `folder` exists, or when `source` is not the expected model: every difference is named,
    and nothing was written. `CheckpointError` when the result would not be complete.
    """
    source = Path(source).expanduser().absolute()
    folder = Path(folder).expanduser().absolute()
    expect = shipped_model(NAME)["expect"] if expect is None else expect
    _refuse(source, folder, expect)
    progress(f"{source}: a {expect['model_type']} as published")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        folder_lock(folder, lambda: progress(f"another process is making {folder}; waiting for it")),
        staging_folder(folder) as staging,
    ):
        for name, text in _written(source, write_configuration(staging)).items():
            (staging / name).write_text(text, encoding="utf-8")
        progress(f"written  {', '.join(sorted(path.name for path in staging.iterdir()))}")
        for path in _unchanged(source, staging):
            how = _link(path, staging / path.relative_to(source))
            progress(f"{how:<8} {path.relative_to(source)} ({path.stat().st_size / 2**20:.1f} MiB)")
        if problems := [*folder_problems(staging), *checkpoint_differences(staging, expect)]:
            raise CheckpointError("; ".join(problems))
        _sync(staging)
        try:
            staging.rename(folder)
        except OSError as error:  # somebody was faster; rename never replaces a folder with something in it
            raise ConfigError(
                f"{folder}: cannot be made ({error.strerror}); expected a folder that is not there"
            ) from None
    _fsync(folder.parent)
    progress(f"{folder}: ready; try: rl360 check model={NAME} {shlex.quote(f'model.path={folder}')}")
    return folder


def _refuse(source: Path, folder: Path, expect: Mapping[str, Any]) -> None:
    problems = []
    if folder.exists() or folder.is_symlink():
        problems.append(f"{folder}: is there already; expected a new folder, nothing is overwritten")
    if not source.is_dir():
        problems.append(f"{source}: no such folder; expected a download of K2 Horizon 7B")
        raise ConfigError(problems)
    if folder.resolve().is_relative_to(source.resolve()):
        problems.append(f"{folder}: inside the download {source}; expected a folder beside it")
    incomplete = folder_problems(source)
    problems += incomplete or checkpoint_differences(source, expect)
    if not incomplete:
        problems += _tokenizer_problems(source)
    if problems:
        raise ConfigError(problems)


def _tokenizer_problems(source: Path) -> list[str]:
    path = source / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return [f"{path}: not found; expected the tokenizer's class and special tokens"]
    raw = json.loads(path.read_text(encoding="utf-8"))  # folder_problems has read it
    found = raw.get("tokenizer_class")
    if found not in KNOWN_TOKENIZER_CLASSES:
        return [f"{path}: tokenizer_class is {found!r}; expected one of {', '.join(KNOWN_TOKENIZER_CLASSES)}"]
    return []


def write_configuration(folder: Path) -> dict[str, Any]:
    """Put the configuration's code into a checkpoint; returns the config.json keys that make readers find it."""
    text = Path(__file__).with_name("k2_horizon_config.py").read_text(encoding="utf-8")
    (folder / CONFIGURATION_FILE).write_text(text, encoding="utf-8")
    return {"auto_map": {"AutoConfig": f"{Path(CONFIGURATION_FILE).stem}.{CONFIG_CLASS}"}}


def _written(source: Path, configuration: Mapping[str, Any]) -> dict[str, str]:
    """The JSON files that change, by name."""
    raw = read_raw_config(source)
    (theta,) = rope_thetas(raw)  # that there is one, and which, has been compared
    rope = {"rope_type": "default", **(raw.get("rope_parameters") or {}), "rope_theta": theta}
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    changed = {
        "rope_theta": theta,
        "rope_parameters": rope,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    tokenizer = json.loads((source / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
    tokenizer["tokenizer_class"] = TOKENIZER_CLASS
    if isinstance(tokenizer.get("extra_special_tokens"), list):  # transformers 4 expects names there, and fails
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    return {
        CONFIG_FILE: json.dumps({**raw, **changed, **configuration}, indent=2) + "\n",
        TOKENIZER_CONFIG_FILE: json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n",
        MANIFEST_FILE: json.dumps({"name": NAME, "source": f"prepared:{source}"}, indent=2) + "\n",
    }


def _unchanged(source: Path, staging: Path) -> Iterator[Path]:
    """Files to link: everything but what was written anew, model code, and what begins with a dot (hub clients')."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and path.suffix != ".py" and not (staging / relative).exists():
            yield path


def _link(path: Path, target: Path) -> str:
    """A hard link to the file itself (a hub cache's symbolic links are followed), else a copy. Says which."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = path.resolve(strict=True)
    try:
        os.link(real, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(real, target)
        return "copied"
    return "linked"


def _sync(staging: Path) -> None:
    for path in staging.rglob("*"):
        if path.is_dir() or path.stat().st_nlink == 1:  # a hard link's data lie on the disk already
            _fsync(path)
    _fsync(staging)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """`rl360 model prepare SOURCE [FOLDER]`: make a K2 Horizon 7B download readable for older runtimes."""
    from rl360.config.resolvers import models_folder

    parser = argparse.ArgumentParser(
        prog="rl360 model prepare",
        description="A K2 Horizon 7B download as a separate folder that transformers 4 and SGLang before 0.5.20 can "
        "read. Weights are hard links, the download stays as it is.",
    )
    parser.add_argument("source", type=Path, help="folder of the download (rl360 model fetch, or hf download)")
    parser.add_argument("folder", type=Path, nargs="?", help=f"folder to make; default: <models>/{NAME}")
    parsed = parser.parse_args(arguments)
    prepare(parsed.source, parsed.folder or Path(models_folder()) / NAME, progress=lambda line: print(line, flush=True))
    return 0
