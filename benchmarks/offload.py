"""How fast a trainer leaves its GPU and comes back: GiB/s each way, in the first cycle and in later ones.

    python benchmarks/offload.py --gib 48                     # a line a cycle, then a summary as JSON
    python benchmarks/offload.py --gib 48 --torch             # the same copies through PyTorch's own pinned memory
    python benchmarks/offload.py --gib 0.5 --device cpu       # does it run at all

The tensors are those of a model in bf16 with fp32 masters and moments: one buffer of weights, a twelfth part of the
rest in each of twelve matrices, and small ones. The first cycle also has the operating system give the pages and CUDA
lock them. Cycle 1 has the moments as well, which a trainer has since its first step, so a part is locked in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl360.trainers.host_memory import GIB
from rl360.trainers.offload import Offloader

MATRICES, SMALL = 12, 100
SMALL_BYTES = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16.0, help="of weights, masters and moments")
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", action="store_true", help="with a block of PyTorch's pinned memory for each tensor")
    asked = parser.parse_args()
    weights = make(asked.gib * GIB * 2 / 14, 1, asked.device)
    masters = make(asked.gib * GIB * 4 / 14, MATRICES, asked.device)
    moments = make(asked.gib * GIB * 8 / 14, 2 * MATRICES, asked.device)
    offloader: Offloader | TorchPinned = TorchPinned() if asked.torch else Offloader()
    found = []
    for cycle in range(asked.cycles):
        keep = weights + masters + (moments if cycle else [])
        before = sums(keep)
        wait(asked.device)
        began = time.perf_counter()
        moved = offloader.offload(keep, drop=[])
        left = time.perf_counter()
        held = torch.cuda.memory_allocated() / GIB if asked.device != "cpu" else 0.0
        again = time.perf_counter()
        offloader.onload()
        back = time.perf_counter()
        assert sums(keep) == before, "values changed on their way"
        row = {
            "cycle": cycle,
            "gib": moved / GIB,
            "offload_s": left - began,
            "onload_s": back - again,
            "out_gib_per_s": moved / GIB / (left - began),
            "in_gib_per_s": moved / GIB / (back - again),
            "host_gib": offloader.host_bytes / GIB,
            "gpu_gib_while_away": held,
        }
        found.append(row)
        print("  ".join(f"{name} {value:.2f}" if name != "cycle" else f"cycle {value}" for name, value in row.items()))
    began = time.perf_counter()
    offloader.close()
    print(json.dumps({"torch_pinned": asked.torch, "close_s": time.perf_counter() - began, "cycles": found}))


class TorchPinned:
    """What PyTorch offers: a pinned block for each tensor, kept for the next time."""

    def __init__(self) -> None:
        self._host: list[Tensor] = []
        self._moved: list[Tensor] = []

    @property
    def host_bytes(self) -> int:
        """As the allocator rounds."""
        return sum(1 << (tensor.numel() - 1).bit_length() for tensor in self._host)

    def offload(self, keep: list[Tensor], drop: list[Tensor]) -> int:
        assert not drop
        self._host += [
            torch.empty(tensor.numel(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            for tensor in keep[len(self._host) :]
        ]
        for tensor, host in zip(keep, self._host, strict=True):
            host.copy_(tensor, non_blocking=True)
        wait(keep[0].device.type)
        self._moved = keep
        for tensor in keep:
            tensor.untyped_storage().resize_(0)
        if keep[0].is_cuda:
            torch.cuda.empty_cache()
        return sum(tensor.numel() for tensor in keep)

    def onload(self) -> None:
        for tensor, host in zip(self._moved, self._host, strict=True):
            tensor.untyped_storage().resize_(tensor.numel())
            tensor.copy_(host, non_blocking=True)
        wait(self._moved[0].device.type)

    def close(self) -> None:
        self._host = []


def make(total: float, matrices: int, device: str) -> list[Tensor]:
    """Random bytes: `matrices` equal tensors, and SMALL small ones."""
    generator = torch.Generator(device).manual_seed(matrices)
    sizes = [int(total) // matrices] * matrices + [SMALL_BYTES] * SMALL
    return [torch.empty(n, dtype=torch.uint8, device=device).random_(0, 256, generator=generator) for n in sizes]


def sums(tensors: list[Tensor]) -> list[int]:
    """One number a tensor, of all its whole words."""
    return [int(tensor[: tensor.numel() // 8 * 8].view(torch.int64).sum()) for tensor in tensors]


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
