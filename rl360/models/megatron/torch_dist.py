"""Megatron's checkpoint format `torch_dist`: boxes of named tensors in, a folder out, and boxes of it back.

In: `Box`es, each the place of one piece in a whole tensor and how to get its values; plain values beside them. Out: a
folder that `megatron.core.dist_checkpointing.load` reads: `*.distcp`, `.metadata` (PyTorch's distributed checkpoint)
and `metadata.json`. Back: any box of any tensor, whatever boxes it was written in, which is all that resharding is.
Left to others: what the tensors mean (hf_weights.py), when a folder counts (convert.py, rl360.engine.state).

Values are asked for one box at a time while the file is written, so a converter need not hold a model. PyTorch's own
writer and reader are used directly rather than through Megatron's: those need CUDA, start a helper process, and gather
the whole optimizer state on every rank.
"""

from __future__ import annotations

import errno
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rl360.engine.disk import is_full
from rl360.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

METADATA = ".metadata"
CONFIG_FILE = "metadata.json"
CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}  # what megatron-core 0.19 writes and expects
COMMON_KEY = "common_state"  # where it keeps everything that is no tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A piece of a tensor: where it lies in the whole, and a function that gives its values when it is written."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Object:
    """A plain value of Megatron's `ShardedObject`: number `index` of `count` under one key."""

    key: str
    value: Any
    index: int = 0
    count: int = 1

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_{self.index}_{self.count}"


def write(
    folder: Path,
    boxes: Sequence[Box],
    common: Mapping[str, Any],
    objects: Sequence[Object] = (),
    group: ProcessGroup | None = None,
    progress: Callable[[Box], None] = lambda box: None,
) -> None:
    """Write `folder`. With a process group this is a collective: each rank gives its own boxes and objects.

    `common` (rank 0's counts) holds plain values and tensors only, so that it can be read without running code. The
    boxes of all ranks must cover each tensor exactly once.

    Raises:
        CheckpointError: they do not; names the first tensor. OSError: the disk failed, on any rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alone = group is None
    first = group is None or group.rank() == 0
    mine = [*objects, Object(COMMON_KEY, dict(common))] if first else list(objects)
    planner = _WritePlanner(boxes, mine, progress)
    try:
        with warnings.catch_warnings() if alone else nullcontext():
            if alone:
                warnings.simplefilter("ignore")  # that one process is no process group
            checkpoint.save(
                {}, storage_writer=FileSystemWriter(folder), planner=planner, process_group=group, no_dist=alone
            )
    except checkpoint.CheckpointException as error:
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        if isinstance(cause, CheckpointError | OSError):
            raise type(cause)(*cause.args) from error
        if is_full(cause, folder):  # torch's own writer says that a position is not the expected one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise CheckpointError(f"{folder}: rank {rank} failed to write: {type(cause).__name__}: {cause}") from error
    if first:
        (folder / CONFIG_FILE).write_text(json.dumps(CONFIG))


class _WritePlanner(SavePlanner):
    """Tells PyTorch's writer what there is, and fetches each piece when its turn comes."""

    def __init__(self, boxes: Sequence[Box], objects: Sequence[Object], progress: Callable[[Box], None]):
        self._boxes = {(box.key, box.offset): box for box in boxes}
        self._objects = {one.unique_key: one for one in objects}
        self._progress = progress

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: everything came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(box.key, torch.Size(box.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)),
                    properties=TensorProperties(dtype=box.dtype),
                    size=torch.Size(box.whole),
                ),
            )
            for box in self._boxes.values()
        ]
        items += [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for key, found in metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                covered = sum(prod(chunk.sizes) for chunk in found.chunks)
                if covered != prod(found.size):
                    raise CheckpointError(
                        f"{key}: the ranks hold {covered} values of {prod(found.size)}; expected each exactly once"
                    )
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self._objects[index.fqn].value], stream)
            return stream
        assert index.offset is not None
        box = self._boxes[index.fqn, tuple(index.offset)]
        value = box.values().detach().reshape(box.shape)
        assert value.dtype == box.dtype, (box.key, value.dtype, box.dtype)
        self._progress(box)
        # A view would be written with all the memory that it is a view of.
        return value.cpu().contiguous() if value.untyped_storage().nbytes() == value.nbytes else value.cpu().clone()


class Reader:
    """A `torch_dist` folder, open for reading. Raises `CheckpointError` for one that is not whole, naming the file."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        for name in (METADATA, CONFIG_FILE):
            if not (self.folder / name).is_file():
                raise CheckpointError(f"{self.folder / name}: not found; expected a complete torch_dist checkpoint")
        self._reader = FileSystemReader(self.folder)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            stored = self._metadata.state_dict_metadata
            self._tensors = {key: found for key, found in stored.items() if isinstance(found, TensorStorageMetadata)}
            for found in self._tensors.values():
                _ = [(found.properties.dtype, found.size, chunk.offsets, chunk.sizes) for chunk in found.chunks]
        except Exception as error:  # a pickle: of changed bytes anything can become
            raise CheckpointError(f"{self.folder / METADATA}: unreadable ({type(error).__name__}: {error})") from error

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def names(self) -> list[str]:
        """The tensors' names."""
        return list(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._found(key).size)

    def dtype(self, key: str) -> torch.dtype:
        return self._found(key).properties.dtype

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The values of one box, as new memory on the CPU."""
        value = torch.empty(tuple(shape), dtype=self.dtype(key))
        self.read_into([(key, offset, value)])
        return value

    def read_into(self, wanted: Iterable[tuple[str, Sequence[int], Tensor]]) -> None:
        """Fill (key, offset, tensor) each; the tensor's shape is the box's, its dtype and device are its own.

        Raises:
            CheckpointError: a tensor is not there, smaller than asked, not covered, or its file is damaged.
        """
        targets: dict[int, Tensor] = {}
        items: list[ReadItem] = []
        for number, (key, offset, value) in enumerate(wanted):
            found = self._found(key)
            size = tuple(found.size)
            if len(size) != len(offset) or any(o + n > s for o, n, s in zip(offset, value.shape, size, strict=True)):
                raise CheckpointError(
                    f"{self.folder}: tensor {key} has shape {list(size)}; box {list(value.shape)} at {list(offset)} is "
                    "not inside it"
                )
            box = ChunkStorageMetadata(torch.Size(offset), value.shape)
            reads = create_read_items_for_chunk_list(key, found, [box])
            if sum(prod(read.lengths) for read in reads) != value.numel():
                raise CheckpointError(f"{self.folder}: tensor {key} is not all there at {list(offset)}")
            for read in reads:
                # The item's index names the target: one key may be asked for many times.
                items.append(ReadItem(**{**_fields(read), "dest_index": MetadataIndex(str(number))}))
            targets[number] = value
        try:
            self._reader.read_data(LoadPlan(items), _ReadPlanner(targets)).wait()
        except Exception as error:
            raise CheckpointError(
                f"{self.folder}: a *.distcp file is unreadable, or {METADATA} is not of these files "
                f"({type(error).__name__}: {error})"
            ) from error

    def common(self) -> dict[str, Any]:
        """Everything that is no tensor, as rank 0 gave it; empty when there is nothing."""
        return dict(self.object(Object(COMMON_KEY, None)) or {})

    def object(self, wanted: Object) -> Any:
        """A plain value by its key, index and count; None when it is not there."""
        key = wanted.unique_key
        if not isinstance(self._metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            return None
        planner = _ReadPlanner({})
        index, nothing = MetadataIndex(key), torch.Size((0,))
        read = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        try:
            self._reader.read_data(LoadPlan([read]), planner).wait()
        except Exception as error:
            raise CheckpointError(f"{self.folder}: {wanted.key} is unreadable ({error})") from error
        return planner.objects[0][0]

    def _found(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise CheckpointError(f"{self.folder}: tensor {key} is not in this checkpoint")
        return self._tensors[key]


class _ReadPlanner(LoadPlanner):
    """Tells PyTorch's reader where each piece goes."""

    def __init__(self, targets: Mapping[int, Tensor]):
        self._targets = targets
        self.objects: list[Any] = []

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing: everything came with the constructor."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects.append(torch.load(value, weights_only=True))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[int(read_item.dest_index.fqn)]
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the tensor is the target itself."""


def _fields(read: ReadItem) -> dict[str, Any]:
    return {name: getattr(read, name) for name in read.__dataclass_fields__}
