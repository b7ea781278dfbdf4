"""Files of a trainer's state: written whole or not at all.

In: a mapping of tensors and plain values. Out: a folder with one file, and the mapping back. Left to others: which
checkpoints to keep (engine/state.py), HF folders (models/loading.py).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl360.errors import CheckpointError

STATE_FILE = "trainer.pt"
FORMAT = 1  # grows when the mapping's keys change


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to folder/trainer.pt: to a temporary file first, flushed to the disk, then renamed over it."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{STATE_FILE}.{os.getpid()}"
    try:
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / STATE_FILE)
    finally:
        unfinished.unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` wrote, tensors on the CPU (mapped from the file: no second copy).

    Raises:
        CheckpointError: no such file, a torn one, or one of another format.
    """
    path = folder / STATE_FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; expected a trainer state that `save` wrote") from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: unreadable ({error}); expected a complete trainer state") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {state.get('format')}; this version reads format {FORMAT}")
    return state
