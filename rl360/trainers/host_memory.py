"""Host memory of exactly the size that is needed, page-locked so that a GPU copies from and to it at full speed.

In: how many bytes there must be. Out: those bytes, as tensors that copies go to and come from. Left to others: what
lies where (rl360.trainers.offload), when it is freed.

PyTorch's own pinned memory rounds each block up to a power of two (ATen/core/CachingHostAllocator.h): 106.8 GiB of
Qwen3-8B took 141.2 GiB. Here the operating system gives pages, and CUDA locks them where they are.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rl360.errors import InfrastructureError

log = logging.getLogger(__name__)

GIB = 2**30
TOUCHING_THREADS = 8  # the kernel clears each page at its first touch; one thread does about 2 GiB/s
PORTABLE = 1  # cudaHostRegisterPortable: locked for every GPU of this process


class HostMemory:
    """One range of bytes, 0 to `size`, that only grows. It consists of blocks, one for each time it grew.

    Args:
        pinned: page-locked for CUDA, which must be there.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[_Block] = []

    @property
    def size(self) -> int:
        return sum(block.size for block in self._blocks)

    def reserve(self, size: int) -> None:
        """Have at least `size` bytes, at most a page more. What there was keeps its place and its values.

        Raises:
            InfrastructureError: the machine does not give that much.
        """
        if size > self.size:
            self._blocks.append(_Block(_in_pages(size - self.size), self._pinned))

    def pieces(self, offset: int, size: int) -> Iterator[Tensor]:
        """The bytes from `offset` on, uint8: one tensor, or several where blocks meet."""
        assert 0 <= offset <= offset + size <= self.size, f"{offset} + {size} of {self.size} bytes"
        start = 0
        for block in self._blocks:
            first, last = max(offset, start), min(offset + size, start + block.size)
            if first < last:
                yield block.bytes[first - start : last - start]
            start += block.size

    def close(self) -> None:
        """Give all of it back."""
        for block in self._blocks:
            block.close()
        self._blocks = []


class _Block:
    """Pages of the operating system, not shared with child processes, so that a fork copies nothing of them."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise InfrastructureError(
                "host_memory", f"{size / GIB:.1f} GiB for an offloaded trainer are not to be had: {error}"
            ) from error
        for name in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # of Linux; without either it works, only slower
            if (advice := getattr(mmap, name, None)) is not None:
                _advise(pages, advice)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None
        if pinned:
            touch(self.bytes)
            if lock(self.bytes):
                # Holds the pages: they must not go before CUDA has let go of them. A process that ends frees both.
                self._unlock = weakref.finalize(self, unlock, self.bytes.data_ptr(), pages)
                self._unlock.atexit = False

    def close(self) -> None:
        if self._unlock is not None:
            self._unlock()
        del self.bytes  # the pages go with the last tensor on them


def _advise(pages: mmap.mmap, advice: int) -> None:
    try:
        pages.madvise(advice)
    except OSError as error:
        log.debug("madvise %d: %s", advice, error)


def touch(whole: Tensor) -> None:
    """Have the kernel put a page behind every address, on several cores: page-locking would do it on one."""
    threads = min(TOUCHING_THREADS, len(os.sched_getaffinity(0)))
    share = _in_pages(-(-whole.numel() // threads))
    parts = [whole[start : start + share : mmap.PAGESIZE] for start in range(0, whole.numel(), share)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(torch.Tensor.zero_, parts))


def lock(whole: Tensor) -> bool:
    """Page-lock it for CUDA. False, with a warning: CUDA refused, and copies are slower but right."""
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), PORTABLE)
    if result == runtime.cudaError.success:
        return True
    try:  # the refusal is still noted as the last error, and this kernel is blamed for it instead of the trainer's next
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        log.debug("blamed: %s", error)
    log.warning(
        "CUDA refused to page-lock %.1f GiB of host memory (cudaHostRegister: %s): the trainer's hand-over is "
        "right, but several times slower; look at `ulimit -l` and at the free memory of the machine and of its cgroup",
        whole.numel() / GIB,
        runtime.cudaGetErrorString(result),
    )
    return False


def unlock(address: int, pages: mmap.mmap) -> None:
    """Undo `lock`. `pages` are only held until then."""
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostUnregister(address)
    if result != runtime.cudaError.success:
        log.warning("cudaHostUnregister of %.1f GiB: %s", len(pages) / GIB, runtime.cudaGetErrorString(result))


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
