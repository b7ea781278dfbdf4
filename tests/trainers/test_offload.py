"""Where offloaded values lie on the host, that they come back bit for bit, and that memory is given back."""

from __future__ import annotations

import logging
import mmap
import resource
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl360.errors import InfrastructureError
from rl360.trainers import host_memory
from rl360.trainers.host_memory import GIB, HostMemory
from rl360.trainers.offload import ALIGNMENT, Offloader, give_back, layout

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)


def in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def test_blocks_lie_one_after_the_other_by_hand() -> None:
    assert layout([]) == ([], 0)
    assert layout([10, 64, 1, 130]) == ([0, 64, 128, 192], 192 + 130)


@given(st.lists(st.integers(1, 2**40), max_size=50))
def test_blocks_are_aligned_do_not_overlap_and_waste_less_than_the_alignment(sizes: list[int]) -> None:
    offsets, total = layout(sizes)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(end <= offset < end + ALIGNMENT for end, offset in zip(ends, offsets[1:], strict=False))
    assert total == (ends[-1] if sizes else 0)
    assert sum(sizes) <= total < sum(sizes) + ALIGNMENT * max(1, len(sizes))


@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=20),
)
def test_memory_that_grew_is_one_range_of_bytes(grown: list[int], sizes: list[int]) -> None:
    """Blocks written where they were laid, across the borders of what was given at once, are read again exactly."""
    memory = HostMemory(pinned=False)
    for size in grown:
        memory.reserve(size)
        assert size <= memory.size == in_pages(memory.size)
    assert memory.size <= in_pages(max(grown))
    offsets, total = layout(sizes)
    memory.reserve(total)
    values = [torch.arange(size).mul(7 + i).to(torch.uint8) for i, size in enumerate(sizes)]
    for offset, value in zip(offsets, values, strict=True):
        start = 0
        for piece in memory.pieces(offset, value.numel()):
            piece.copy_(value[start : start + piece.numel()])
            start += piece.numel()
        assert start == value.numel()
    for offset, value in zip(offsets, values, strict=True):
        assert torch.equal(torch.cat(list(memory.pieces(offset, value.numel()))), value)
    memory.close()
    assert memory.size == 0


def test_a_range_beyond_the_memory_is_a_bug() -> None:
    memory = HostMemory(pinned=False)
    memory.reserve(1)
    with pytest.raises(AssertionError, match=f"1 \\+ {mmap.PAGESIZE} of {mmap.PAGESIZE} bytes"):
        list(memory.pieces(1, mmap.PAGESIZE))


def test_more_memory_than_there_is_is_refused_by_size_and_nothing_is_lost() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    offloader, values = Offloader(), torch.arange(2**26, dtype=torch.uint8)
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, hard))
        with pytest.raises(InfrastructureError, match=r"host_memory: 0\.1 GiB for an offloaded trainer") as caught:
            offloader.offload([values], drop=[])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert caught.value.cause == "host_memory"
    assert not offloader.is_offloaded
    assert torch.equal(values, torch.arange(2**26, dtype=torch.uint8))


def test_offloaded_storages_are_empty_and_their_views_come_back() -> None:
    whole = torch.arange(12.0)
    view, scratch = whole[4:8].view(2, 2), torch.ones(5)
    offloader = Offloader()
    assert offloader.offload(keep=[view, whole], drop=[scratch]) == (12 + 5) * 4
    assert whole.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
    offloader.onload()
    assert view.tolist() == [[4, 5], [6, 7]]
    assert whole.tolist() == list(range(12))
    assert scratch.tolist() == [0.0] * 5
    offloader.offload([whole], [])  # again, with the same host memory
    offloader.onload()
    assert whole.sum() == 66


def test_the_hosts_memory_is_what_was_moved_grows_with_it_and_ends_with_close() -> None:
    """Adam's moments come with the first step, after a trainer has left its GPU for the first time."""
    weights = [torch.randn(1000, 7).bfloat16(), torch.randn(3, dtype=torch.float64)]
    moments = [torch.randn(5000), torch.randint(9, (3, 3))]
    offloader = Offloader()
    assert offloader.host_bytes == 0
    offloader.offload(weights, drop=[])
    first = offloader.host_bytes
    assert first == in_pages(14_016 + 24)  # 14,000 bytes, aligned, and 24
    offloader.onload()
    held = [tensor.clone() for tensor in weights + moments]
    for _ in range(3):
        offloader.offload(reversed(weights + moments), drop=[])
        assert offloader.host_bytes == in_pages(128 + 20_032 + 64 + 14_000)
        offloader.onload()
    assert all(torch.equal(tensor, value) for tensor, value in zip(weights + moments, held, strict=True))
    offloader.close()
    assert offloader.host_bytes == 0
    assert all(torch.equal(tensor, value) for tensor, value in zip(weights + moments, held, strict=True))


def test_trim_on_a_cpu_moves_nothing() -> None:
    values = torch.arange(5)
    offloader = Offloader()
    offloader.trim([values], drop=[])
    assert offloader.host_bytes == 0
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_a_fork_does_not_see_the_memory() -> None:
    """Else it would copy every locked page when it is made, and count it once more."""
    memory = HostMemory(pinned=False)
    memory.reserve(2**20)
    (piece,) = memory.pieces(0, 2**20)
    with open("/proc/self/smaps") as file:
        areas = file.read().split("VmFlags:")
    (flags,) = [
        after.split("\n", 1)[0].split()
        for before, after in pairwise(areas)
        if any(line.startswith(f"{piece.data_ptr():x}-") for line in before.splitlines())
    ]
    assert "dc" in flags  # "do not copy area on fork"
    memory.close()


# ---- on a GPU


def random_tensors(total: int, device: str, seed: int = 0) -> list[torch.Tensor]:
    """Of every dtype and of odd sizes; `total` bytes, nearly all of them in a few."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [1, 7, 1001, 65_537, *[total // 8] * 7]
    sizes.append(total - sum(sizes))
    tensors = []
    for number, size in enumerate(sizes):
        dtype = DTYPES[number % len(DTYPES)]
        count = size // dtype.itemsize * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator, device=device)
        tensors.append(raw.view(dtype))
    return tensors


def total_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # bits, since a NaN is not equal to itself


@pytest.mark.gpu
def test_cycles_on_a_gpu_give_both_memories_back_and_every_bit(capsys: pytest.CaptureFixture[str]) -> None:
    gib = 2.0
    torch.cuda.empty_cache()
    before_reserved, before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    tensors, scratch = random_tensors(int(gib * GIB), "cuda"), torch.ones(2**20, device="cuda")
    held = [tensor.cpu() for tensor in tensors]
    offloader, moments, lines = Offloader(), random_tensors(2**26, "cuda", 1), []
    held_moments = [tensor.cpu() for tensor in moments]
    for cycle in range(4):
        keep = tensors if cycle == 0 else tensors + moments  # the second time there is more
        size, moved = total_bytes(keep), total_bytes([*keep, scratch])
        allocated = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        began = time.perf_counter()
        assert offloader.offload(keep, drop=[scratch]) == moved
        left = time.perf_counter()
        assert torch.cuda.memory_allocated() <= allocated - moved
        assert torch.cuda.memory_reserved() <= before_reserved + 2**27 + 2**25
        assert size <= offloader.host_bytes < size + ALIGNMENT * len(keep) + 2 * mmap.PAGESIZE
        offloader.onload()
        back = time.perf_counter()
        scale = size / GIB
        lines.append(f"cycle {cycle}: {size / GIB:.2f} GiB, {(left - began) / scale:.3f} s/GiB out, ")
        lines[-1] += f"{(back - left) / scale:.3f} s/GiB in"
        for tensor, value in zip(tensors + moments, held + held_moments, strict=True):
            assert torch.equal(raw(tensor).cpu(), raw(value))
        assert not scratch.any()
        tensors[5].view(torch.uint8)[::3] += 1  # a step
        held[5].view(torch.uint8)[::3] += 1
    with capsys.disabled():
        print("", *lines, sep="\n")
    offloader.offload(tensors + moments, drop=[scratch])
    offloader.close()
    assert offloader.host_bytes == 0
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
def test_trim_gives_back_what_a_step_took_also_from_under_moments_that_lie_in_it() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    weights = torch.ones(2**26, dtype=torch.uint8, device="cuda")
    activations = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    del activations
    moments = torch.full((2**24,), 2.5, device="cuda")  # 64 MiB, out of the 3 GiB that are free
    gradients = torch.ones(2**20, device="cuda")
    assert give_back() >= 3 * GIB - 2**26 - 2**22
    offloader = Offloader()
    offloader.trim([weights, moments], [gradients])
    assert torch.cuda.memory_reserved() <= before + 2**27 + 2**25
    assert weights.sum() == 2**26
    assert (moments == 2.5).all()
    assert not offloader.is_offloaded
    assert offloader.host_bytes == 2**27
    assert not gradients.any()
    gradients.fill_(1)
    offloader.trim([weights, moments], [gradients])
    assert gradients.all()  # nothing was moved any more
    offloader.close()


@pytest.mark.gpu
def test_pages_are_locked_until_close_or_until_nobody_has_the_offloader() -> None:
    def memory() -> HostMemory:
        found = HostMemory(pinned=True)
        found.reserve(2**24)
        return found

    first = memory()
    (piece,) = first.pieces(0, 2**24)
    assert piece.is_pinned()
    first.close()
    assert not piece.is_pinned()
    del piece
    other = memory()
    (piece,) = other.pieces(0, 2**24)
    assert piece.is_pinned()
    del other
    assert not piece.is_pinned()  # its pages are still there, and unlocked
    assert piece.sum() == 0


@pytest.mark.gpu
def test_where_cuda_refuses_to_lock_the_copies_are_right_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused for real: what is locked already cannot be locked again."""
    real, refused = host_memory.lock, []

    def twice(whole: torch.Tensor) -> bool:
        assert real(whole)
        refused.append(real(whole))
        host_memory.unlock(whole.data_ptr(), mmap.mmap(-1, 1))
        return refused[-1]

    monkeypatch.setattr(host_memory, "lock", twice)
    values = torch.arange(10_000_019, device="cuda")
    offloader = Offloader()
    with caplog.at_level(logging.WARNING):
        offloader.offload([values], drop=[])
    assert refused == [False]
    assert "CUDA refused to page-lock 0.1 GiB of host memory (cudaHostRegister: " in caplog.text
    offloader.onload()
    assert torch.equal(values, torch.arange(10_000_019, device="cuda"))  # and no kernel is blamed for the refusal
    offloader.close()
