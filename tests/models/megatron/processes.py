"""Several processes of one test, forked from a server that has imported torch and Megatron once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PRELOADED = ["torch", "megatron.core.models.gpt", "megatron.core.dist_checkpointing", "megatron.core.optimizer"]


def run_ranks(function: Callable[..., None], size: int, tmp_path: Path, *arguments: Any) -> None:
    """Call function(rank, size, store, *arguments) in `size` processes. The first that raises fails the test."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    number = len(list(tmp_path.glob("store-*")))
    store = tmp_path / f"store-{number}"
    store.touch()
    torch.multiprocessing.start_processes(
        function, args=(size, str(store), *arguments), nprocs=size, start_method="forkserver"
    )
