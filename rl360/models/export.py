"""An HF folder from whatever a run left: a run, one of its checkpoints, or a Megatron folder, of either trainer.

In: a path. Out: a folder that transformers and SGLang load. Left to others: which checkpoints a run keeps
(rl360.engine.state), Megatron's format (rl360.models.megatron.convert).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from rl360.engine.state import Checkpoint
    from rl360.models.hf_folder import Ranks

TORCH_STATE = "trainer.pt"  # what trainer=torch writes (rl360.trainers.checkpoint)
MEGATRON_MARKS = ("latest_checkpointed_iteration.txt", ".metadata")  # a Megatron folder has one or the other


@dataclass(frozen=True, slots=True)
class Source:
    """Weights on disk, and where config and tokenizer are when they are not beside them."""

    weights: Path
    megatron: bool
    companions: Path | None
    checkpoint: Checkpoint | None = None  # of a run, whose checksums say whether the bytes are still those


def find_weights(path: Path, model: Path | None = None, best: bool = False) -> Source:
    """What `path` means: a run folder (its newest complete checkpoint, or the best), a checkpoint, a trainer's folder.

    model: the HF folder with config and tokenizer; None: the one that the run's resolved.yaml names. Raises
    `CheckpointError` when there is nothing complete.
    """
    from rl360.engine.state import MANIFEST, TRAINER, CheckpointStore, read_checkpoint

    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected a run, a checkpoint or a Megatron folder")
    folder, run, checkpoint = path, None, None
    if (around := checkpoint_around(path)) is not None:
        folder = around
    if best and not (path / "checkpoints").is_dir():
        raise ConfigError(f"{path}: no run, so it has no best checkpoint; leave out --best, or name the run")
    if (path / "checkpoints").is_dir():
        store = CheckpointStore(path)
        found = store.best() if best else store.latest()
        if found is None:
            raise CheckpointError(f"{path / 'checkpoints'}: no complete {'best ' if best else ''}checkpoint")
        folder, run = found.folder, path
    if (folder / TRAINER).is_dir() or (folder / MANIFEST).is_file():
        checkpoint = read_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{folder}: incomplete or damaged; name another checkpoint")
        run = run or folder.parent.parent
        folder = path if around is not None and path.name.startswith("iter_") else folder / TRAINER
    elif folder.name == TRAINER:
        run = folder.parent.parent.parent
    companions = model or (_model_of(run) if run is not None else None)
    if (folder / TORCH_STATE).is_file():
        if companions is None:
            raise ConfigError(f"{folder}: holds no config.json; name the model's HF folder with --model")
        return Source(folder, False, companions, checkpoint)
    if any((folder / name).is_file() for name in MEGATRON_MARKS):
        # A Megatron checkpoint carries its own config; only what the user names comes before it.
        return Source(folder, True, model, checkpoint)
    raise CheckpointError(f"{path}: no weights in it; expected {TORCH_STATE}, or a Megatron checkpoint")


def checkpoint_around(path: Path) -> Path | None:
    """The folder of a run's checkpoint when `path` is what its trainer wrote, or an iteration's folder in that."""
    from rl360.engine.state import MANIFEST, TRAINER

    place = path.resolve()
    trainer = place.parent if place.name.startswith("iter_") else place
    return trainer.parent if trainer.name == TRAINER and (trainer.parent / MANIFEST).is_file() else None


def refuse_changed(path: Path) -> None:
    """Raises `CheckpointError` when `path` is inside a run's checkpoint whose bytes are not those that were saved."""
    from rl360.engine.state import read_checkpoint, verify_checkpoint

    if (folder := checkpoint_around(path)) is None:
        return
    if (checkpoint := read_checkpoint(folder)) is None:
        raise CheckpointError(f"{folder}: incomplete or damaged; name another checkpoint")
    verify_checkpoint(checkpoint)


def export_hf(
    path: Path | str,
    out: Path | str,
    model: Path | str | None = None,
    best: bool = False,
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    max_shard_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Make the HF folder `out`; see `find_weights` for `path`. Returns the folder that the weights came from.

    dtype: of trainer=torch's checkpoints, whose weights are kept in fp32; None: the one that the run trained and
    served in, fp32 on a CPU and bf16 on a GPU. Megatron's keep theirs. Raises `ConfigError` and `CheckpointError`; a
    run's checkpoint is read whole first, and one whose bytes have changed is refused.
    """
    from rl360.engine.state import verify_checkpoint
    from rl360.models.hf_folder import DEFAULT_SHARD_BYTES, Ranks, refuse_existing

    source = find_weights(Path(path), None if model is None else Path(model), best)
    limit = max_shard_bytes or DEFAULT_SHARD_BYTES
    ranks = ranks or Ranks()
    if source.megatron and dtype is not None:
        raise ConfigError(f"{source.weights}: a Megatron checkpoint keeps its dtype; leave out --dtype")
    with ranks.together():
        if ranks.rank == 0:
            refuse_existing(Path(out))  # known at once; the checkpoint takes a while to read
            if source.checkpoint is not None:
                verify_checkpoint(source.checkpoint)
    if source.megatron:
        from rl360.models.megatron.convert import to_hf

        to_hf(source.weights, Path(out), source.companions, ranks, limit, progress)
    else:
        _export_torch(source, Path(out), dtype, ranks, limit, progress)
    return source.weights


def _export_torch(
    source: Source,
    out: Path,
    dtype: torch.dtype | None,
    ranks: Ranks,
    max_shard_bytes: int,
    progress: Callable[[int, int], None],
) -> None:
    import torch

    from rl360.models.architecture import DECIDE_WEIGHTS, another_model
    from rl360.models.hf_folder import LazyTensor, new_folder, write_weights
    from rl360.models.loading import copy_companions, read_config
    from rl360.models.weight_files import ANOTHER_HEAD, EMBEDDING, HEAD, expected_tensors, same_values
    from rl360.trainers.checkpoint import read_state

    assert source.companions is not None
    config = read_config(source.companions)
    expected = expected_tensors(config)
    state = read_state(source.weights)
    weights = state["optimizer"]["masters"]
    file = source.weights / TORCH_STATE
    for name, shape in expected.items():
        if name not in weights:
            raise CheckpointError(f"{file}: tensor {name} is missing")
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {list(weights[name].shape)}, {source.companions / 'config.json'} "
                f"gives {list(shape)}"
            )
    for name in weights:
        if name not in expected and not (name == HEAD and same_values(weights[name], weights[EMBEDDING])):
            problem = ANOTHER_HEAD if name == HEAD else f"tensor {name} is not in a model of this config"
            raise CheckpointError(f"{file}: {problem}")
    if (difference := another_model(config, state.get("model", {}), DECIDE_WEIGHTS)) is not None:
        raise CheckpointError(f"{source.companions / 'config.json'}: {difference} ({file})")
    if dtype is None:
        dtype = torch.bfloat16 if "rng_cuda" in state else torch.float32
    target = dtype

    def values(name: str) -> torch.Tensor:
        return weights[name].to(target)

    tensors = [LazyTensor(name, shape, target, partial(values, name)) for name, shape in expected.items()]
    total, done = sum(tensor.num_bytes for tensor in tensors), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    with new_folder(out, ranks) as staging:
        write_weights(staging, tensors, ranks, max_shard_bytes, count)
        with ranks.together():
            if ranks.rank == 0:
                copy_companions(source.companions, staging, target)


def _model_of(run: Path) -> Path | None:
    """The HF folder that a run started from, by its resolved.yaml; None when that says nothing that is still there."""
    import yaml

    try:
        resolved = yaml.safe_load((run / "resolved.yaml").read_text())
        named = resolved["model"].get("path") or Path(resolved["paths"]["models"]) / resolved["model"]["name"]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
    return Path(named) if (Path(named) / "config.json").is_file() else None
