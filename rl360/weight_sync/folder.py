"""Hashes of weights that go through an HF folder: of the trainer's tensors as they are written, and of what is in it.

In: tensors on their way into a folder, or a folder. Out: an `Expectation` of what engines hold that have loaded it.
What was read back from the folder cannot say that it holds what the trainer has: that takes the hashes of the tensors.
Writing is left to the trainers, comparing to rl360.weight_sync.sync.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl360.weight_sync.buckets import GPU_KERNEL, Expectation, tensor_hash


def hashing(
    named: Iterable[tuple[str, Tensor]], expectation: Expectation | None, dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, each hashed where it lies as it goes by.

    Args:
        expectation: gets the hashes; None: nothing is hashed.
        dtype: what engines hold ("bfloat16"); None: as the tensors are.
    """
    for name, tensor in named:
        if expectation is not None:
            expectation.add([(name, _in_dtype(tensor, dtype))])
        yield name, tensor


def folder_expectation(
    folder: Path, kind: str, dtype: str | None, ways: tuple[int, ...], written: Expectation | None
) -> Expectation | None:
    """Hashes of a folder's tensors as an engine of that dtype reports them; None where they cannot be computed.

    written: hashes of the trainer's whole tensors, of another kind than the engine's. What is read is compared with
        them, and differences are `spoilt`. None: the folder is taken for what the trainer has.
    """
    from safetensors import safe_open

    if kind == GPU_KERNEL and not torch.cuda.is_available():
        return None
    if written is not None and written.kind == GPU_KERNEL and not torch.cuda.is_available():
        return None  # what the trainer has cannot be compared with
    raw: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    found = Expectation(ways, raw.get("num_key_value_heads") or raw.get("num_attention_heads"))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt", device="cuda" if kind == GPU_KERNEL else "cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                if name != "lm_head.weight" or not raw.get("tie_word_embeddings"):
                    tensor = _in_dtype(tensors.get_tensor(name), dtype)
                    found.add([(name, tensor)])
                    if written is not None:
                        there = tensor_hash(tensor.to("cuda" if written.kind == GPU_KERNEL else "cpu"))
                        if there != written.hashes.get(name):
                            had = written.hashes.get(name)
                            found.spoilt.append(f"{file}: {name} is {there}, the trainer's {had or 'has no such name'}")
    if written is not None:
        found.spoilt += [f"{folder}: {name} is not in it" for name in written.hashes if name not in found.hashes]
    return found


def _in_dtype(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor.detach() if dtype is None else tensor.detach().to(getattr(torch, dtype))
