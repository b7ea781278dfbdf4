"""Buckets of HF-named tensors, laid flat, and what an engine must hold once it has loaded them.

In: an iterator of (HF name, tensor), such as a decoder's parameters or what Megatron ranks gather. Out: `FlatBucket`s
of bounded size, and an `Expectation`: a hash of every tensor, also under the joined names that SGLang gives to q, k, v
and gate, up. Moving buckets is left to rl360.weight_sync.sources, asking engines for their hashes to .sync.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SHA256, GPU_KERNEL = "sha256", "gpu_kernel"  # SGLang hashes a tensor in another way on each kind of device
HASH_KERNEL = "kernels/ops/memory/gpu_tensor_hash.py"  # of SGLang 0.5.16; needs torch and Triton only
VOCAB_MULTIPLE = 64  # rows of an embedding or a head on SGLang's side
# SGLang keeps q, k, v in one tensor, rows one after the other, and gate, up in another: (its name, their names).
JOINED = (
    ("self_attn.qkv_proj.weight", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    ("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Where one tensor lies in a flat bucket: SGLang's field names; indices in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int

    @property
    def numel(self) -> int:
        """Bytes, as SGLang counts them here."""
        return self.end_idx - self.start_idx


@dataclass(frozen=True, slots=True, eq=False)
class FlatBucket:
    """Some tensors as one run of bytes, on their device."""

    flat_B: Tensor  # uint8
    metas: tuple[TensorMeta, ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into the flat tensor."""
        return unflatten(self.flat_B, self.metas)


def unflatten(flat_B: Tensor, metas: Sequence[TensorMeta]) -> Iterator[tuple[str, Tensor]]:
    """(name, view) of every tensor in a flat bucket."""
    for meta in metas:
        yield meta.name, flat_B[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)


def flatten(named: Sequence[tuple[str, Tensor]]) -> FlatBucket:
    """Copy tensors into one run of bytes. They are of one device and one dtype."""
    metas: list[TensorMeta] = []
    at = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        metas.append(TensorMeta(name, tuple(tensor.shape), tensor.dtype, at, at + size))
        at += size
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in named]
    return FlatBucket(torch.cat(parts), tuple(metas))


def bucketed(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of one dtype and at most `max_bytes`; a tensor above that has a group of its own. No group is empty.

    One dtype, because SGLang reads each tensor where it lies, and a view needs a start that its dtype divides.
    """
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if group and (size + tensor_bytes > max_bytes or tensor.dtype != group[0][1].dtype):
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += tensor_bytes
    if group:
        yield group


def tensor_hash(tensor: Tensor) -> str | None:
    """SGLang 0.5.16's hash of a tensor, 16 hex digits, as its /weights_checker reports it.

    On the CPU: the first 8 bytes of the SHA-256 of its memory. On CUDA: the kernel of the installed sglang; None
    where there is none, and then engines can only be compared with one another.
    """
    if tensor.is_cuda:
        kernel = _hash_kernel()
        if kernel is None:
            return None
        with torch.cuda.device(tensor.device):  # Triton launches on the thread's own device, which need not be this
            whole = tensor.detach().contiguous()
            words = whole.storage_offset() * whole.element_size() % 4 == 0  # it reads 32 bits at a time
            return f"{kernel(whole if words else whole.clone()):016x}"
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


@lru_cache(maxsize=1)
def _hash_kernel() -> Callable[[Tensor], int] | None:
    """SGLang's file by itself: importing the package takes seconds, and changes transformers in this process."""
    package = importlib.util.find_spec("sglang")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / HASH_KERNEL
        if file.is_file():
            spec = importlib.util.spec_from_file_location("rl360_sglang_tensor_hash", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # Triton looks a kernel's module up there
            try:
                spec.loader.exec_module(module)
            except ImportError:  # no Triton here
                return None
            found: Callable[[Tensor], int] = module.gpu_tensor_hash
            return found
    return None


@dataclass(slots=True)
class Expectation:
    """What every engine must report after a synchronisation, filled as the tensors go by.

    `buckets` says which tensors travelled together, so that a misfit is named with its bucket. `kind` is that of every
    hash in it: hashes of another kind cannot be compared with these.
    """

    kind: str = SHA256
    hashes: dict[str, str | None] = field(default_factory=dict)
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)  # SGLang's name -> the HF names in it
    buckets: list[tuple[str, ...]] = field(default_factory=list)
    _parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """One bucket's tensors. Parts of a joined tensor are kept until the last of them has come."""
        self.buckets.append(tuple(name for name, _ in named))
        self.kind = GPU_KERNEL if named[0][1].is_cuda else SHA256
        for name, tensor in named:
            self.hashes[name] = None if _padded(name, tensor) else tensor_hash(tensor)
            for joined, parts in JOINED:
                if name.endswith(parts):
                    prefix = name[: -len(next(part for part in parts if name.endswith(part)))]
                    self._join(prefix + joined, tuple(prefix + part for part in parts), name, tensor)

    def _join(self, joined: str, parts: tuple[str, ...], name: str, tensor: Tensor) -> None:
        if not tensor.is_cuda:  # the embedded engine keeps HF's own names
            self.joined[joined] = parts
            return
        held = self._parts.setdefault(joined, {})
        held[name] = tensor
        if len(held) == len(parts):
            self.hashes[joined] = tensor_hash(torch.cat([held[part] for part in parts]))
            self.joined[joined] = parts
            del self._parts[joined]

    def merge(self, other: Expectation) -> None:
        """What another source sent beside it."""
        self.kind = other.kind
        self.hashes.update(other.hashes)
        self.joined.update(other.joined)
        self.buckets.extend(other.buckets)

    def problems(self, reported: Mapping[str, str]) -> list[str]:
        """How an engine's hashes (of one rank that holds whole tensors) differ from what was sent."""
        covered = {part for joined, parts in self.joined.items() if joined in reported for part in parts}
        found = []
        for index, names in enumerate(self.buckets):
            for name in names:
                if name in reported:
                    if self.hashes[name] is not None and reported[name] != self.hashes[name]:
                        found.append(f"bucket {index}: {name} is {reported[name]}, sent {self.hashes[name]}")
                elif name not in covered:
                    found.append(f"bucket {index}: {name} is not in the engine")
        for joined in self.joined:
            expected = self.hashes.get(joined)
            if expected is not None and joined in reported and reported[joined] != expected:
                found.append(f"{joined} is {reported[joined]}, sent {expected}")
        sent = set(self.hashes) | set(self.joined)
        found += [f"{name} was not sent" for name in reported if name not in sent and not _not_sent(name)]
        return found


def _padded(name: str, tensor: Tensor) -> bool:
    """Whether SGLang holds more rows of it than were sent: it fills vocabularies up."""
    vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    return tensor.is_cuda and vocabulary and tensor.shape[0] % VOCAB_MULTIPLE != 0


def _not_sent(name: str) -> bool:
    """An engine's tensors that no checkpoint has: tables computed from the config, and a head tied to the embedding."""
    return any(part in name for part in ("cos_sin_cache", "inv_freq")) or name == "lm_head.weight"
