"""A Hugging Face folder written from tensors that are fetched one at a time: no model is held to write it.

In: names, shapes and a function for each tensor's values; the folder that config and tokenizer come from. Out:
`model.safetensors`, or shards with an index, and the files beside them, whole or not there at all. With several ranks
each writes its own shards. Left to others: where values come from (rl360.models.megatron.convert, rl360.models.export).
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl360.errors import ConfigError, RL360Error
from rl360.models.weight_files import INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_SHARD_BYTES = 5 * 10**9  # what transformers writes: fits every file system and download client
UNFINISHED, REPLACED = ".unfinished", ".replaced"

# How safetensors spells what PyTorch calls otherwise.
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One tensor of the folder to be, and how to get its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Ranks:
    """The processes that share a piece of work: those of torchrun, or this one alone."""

    def __init__(self, group: ProcessGroup | None = None):
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @classmethod
    def of_torchrun(cls) -> Ranks:
        """Join torchrun's processes (gloo: nothing here needs a GPU); without torchrun, or with one, this one alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
            # Gloo's threads that still run when the interpreter is taken down abort the process, its work done or not.
            atexit.register(torch.distributed.destroy_process_group)
        return cls(torch.distributed.group.WORLD)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one rank fails in, all fail in: nobody waits for one that is gone. Raises the first rank's error."""
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:  # told to the other ranks, then raised again
            error = caught
        if self.group is None:
            if error is not None:
                raise error
            return
        messages: list[str | None] = [None] * self.size
        text = None if error is None else str(error) if isinstance(error, RL360Error) else repr(error)
        torch.distributed.all_gather_object(messages, text, group=self.group)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RL360Error(f"rank {rank}: {message}")


@contextmanager
def new_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """A folder beside `folder` to write into; renamed to it when all ranks leave without error, else removed.

    A link is followed: the folder is made where it points. Raises `ConfigError`, before any work, when `folder` is
    there already and not empty, cannot be replaced, or another process is making it.
    """
    given, folder = folder, folder.resolve()
    staging = folder.parent / f".{folder.name}{UNFINISHED}"
    with _only_one(given, folder, ranks):
        with ranks.together():
            if ranks.rank == 0:
                if staging.exists():  # of a run that was killed: the lock says that nobody writes it now
                    shutil.rmtree(staging)
                staging.mkdir()
        try:
            yield staging
            with ranks.together():
                if ranks.rank == 0:
                    sync_tree(staging)
                    staging.rename(folder)  # in the place of an empty one, if any
                    sync_path(folder.parent)
        except BaseException as error:
            if ranks.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(given)  # a write that fails does not say where
            raise


def refuse_existing(folder: Path) -> None:
    """Raises `ConfigError` when `folder` is there and not empty, or could not be replaced when all is written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already; name a new folder, or remove this one")
    if os.path.ismount(folder):
        raise ConfigError(f"{folder}: a mount point, which no new folder can replace; name a folder in it")
    if folder.exists() and folder.samefile(Path.cwd()):
        raise ConfigError(f"{folder}: the folder that you are in; name a new one")


@contextmanager
def _only_one(given: Path, folder: Path, ranks: Ranks) -> Iterator[None]:
    lock: Any = None
    try:
        with ranks.together():
            if ranks.rank == 0:
                refuse_existing(given)
                folder.parent.mkdir(parents=True, exist_ok=True)
                lock = open(folder.parent / f".{folder.name}.lock", "w")  # noqa: SIM115 (closed below, on every path)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(f"{given}: another process is making it; wait for it or end it") from None
        try:
            yield
        finally:
            if lock is not None:
                Path(lock.name).unlink(missing_ok=True)
    finally:
        if lock is not None:
            lock.close()


def write_weights(
    folder: Path,
    tensors: Sequence[LazyTensor],
    ranks: Ranks,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the tensors, in the order given, to one file or to shards of at most `max_shard_bytes` with their index.

    Rank i writes every i-th shard. A tensor larger than a shard has one to itself. `progress` gets the bytes of each
    tensor that this rank has written.
    """
    shards = plan_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    else:
        names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    with ranks.together():
        for number in range(ranks.rank, len(shards), ranks.size):
            write_safetensors(folder / names[number], shards[number], progress)
        if ranks.rank == 0 and len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
                "weight_map": {t.name: file for file, shard in zip(names, shards, strict=True) for t in shard},
            }
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def plan_shards(tensors: Sequence[LazyTensor], max_shard_bytes: int) -> list[list[LazyTensor]]:
    """Cut the sequence where the next tensor would not fit any more."""
    shards: list[list[LazyTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def write_safetensors(path: Path, tensors: Sequence[LazyTensor], progress: Callable[[int], None]) -> None:
    """One safetensors file: eight bytes of length, a JSON header, the tensors' bytes one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight, as the format asks
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = tensor.values()
            assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), tensor.name
            file.write(memoryview(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
            progress(tensor.num_bytes)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` for one process to write into; it takes its place, whole or not at all.

    What is there already steps aside first, since a rename replaces only empty folders. `new_folder` refuses it
    instead, and is for several processes. What a killed process left of it is put right first.
    """
    folder = folder.resolve()  # a link stays one
    staging = folder.parent / f".{folder.name}{UNFINISHED}"
    aside = folder.parent / f".{folder.name}{REPLACED}"
    if aside.exists() and not folder.exists():  # killed between the two renames
        aside.rename(folder)
    for left in (staging, aside):
        if left.exists():
            shutil.rmtree(left)
    staging.mkdir(parents=True)
    try:
        yield staging
        sync_tree(staging)
        if folder.exists():
            folder.rename(aside)
        staging.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
        sync_path(folder.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def sync_tree(folder: Path) -> None:
    """Bring every file and folder under `folder`, and itself, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
