"""Buckets of HF-named tensors, laid flat, and what an engine must hold once it has loaded them.

In: an iterator of (HF name, tensor), such as a decoder's parameters or what Megatron ranks gather. Out: `FlatBucket`s
of bounded size, and an `Expectation`: a hash of every tensor, and of what each rank of an SGLang server keeps of it
(its layout is .shards). Moving buckets is left to rl360.weight_sync.sources, asking engines for their hashes to .sync.
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

from rl360.weight_sync.shards import WHOLE, Parameter, held_by, parameter_named, parameter_with

SHA256, GPU_KERNEL = "sha256", "gpu_kernel"  # SGLang hashes a tensor in another way on each kind of device
HASH_KERNEL = "kernels/ops/memory/gpu_tensor_hash.py"  # of SGLang 0.5.16; needs torch and Triton only


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


@dataclass(frozen=True, slots=True)
class RankHashes:
    """What one rank of an engine says that it holds."""

    hashes: Mapping[str, str]  # by the engine's names
    rank: int = 0
    ways: int = 1  # of so many tensor-parallel ranks
    only_tensor_parallel: bool = True  # it also has no stage, nor a share of an attention that is split by requests


@dataclass(slots=True)
class Expectation:
    """What every engine must report after a synchronisation, filled as the tensors go by.

    Args:
        ways: the tensor-parallel sizes of the engines: for each, the slices of every rank are hashed.
        kv_heads: key/value heads of the model; None: q, k, v of engines with several ranks are not foretold.

    `buckets` says which tensors travelled together, so that a misfit is named with its bucket. `kind` is that of every
    hash in it: hashes of another kind cannot be compared with these. `spoilt` is what was wrong before any engine
    loaded it: a problem of all of them.
    """

    ways: tuple[int, ...] = (1,)
    kv_heads: int | None = None
    kind: str = SHA256
    hashes: dict[str, str | None] = field(default_factory=dict)  # of whole tensors by HF name; None: not computed
    slices: dict[int, dict[str, list[str | None]]] = field(default_factory=dict)  # by ways, SGLang's name, rank
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)  # SGLang's name -> the HF names in it
    buckets: list[tuple[str, ...]] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)
    _parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """One bucket's tensors. Parts of a joined tensor are kept until the last of them has come."""
        self.buckets.append(tuple(name for name, _ in named))
        self.kind = GPU_KERNEL if named[0][1].is_cuda else SHA256
        for name, tensor in named:
            self.hashes[name] = tensor_hash(tensor) if 1 in self.ways else None
            parameter = parameter_with(name)
            if parameter is None:
                continue
            if len(parameter.parts) > 1:
                self.joined[parameter.name] = parameter.parts
            sizes = [n for n in self.ways if n > 1 or tensor.is_cuda]  # on a CPU one rank alone keeps HF's own names
            held = self._parts.setdefault(parameter.name, {}) if sizes else {}
            held[name] = tensor
            if sizes and len(held) == len(parameter.parts):
                del self._parts[parameter.name]
                self._hash_slices(parameter, [held[part] for part in parameter.parts], sizes)

    def _hash_slices(self, parameter: Parameter, parts: Sequence[Tensor], sizes: Sequence[int]) -> None:
        for ways in sizes:
            found: list[str | None] = []
            for rank in range(ways):
                if found and parameter.shared == WHOLE:
                    found.append(found[0])
                    continue
                held = held_by(parameter, parts, rank, ways, self.kv_heads)
                found.append(None if held is None else tensor_hash(held))
            self.slices.setdefault(ways, {})[parameter.name] = found

    def merge(self, other: Expectation) -> None:
        """What another source sent beside it."""
        self.kind = other.kind
        self.hashes.update(other.hashes)
        self.joined.update(other.joined)
        self.buckets.extend(other.buckets)
        self.spoilt.extend(other.spoilt)
        for ways, slices in other.slices.items():
            self.slices.setdefault(ways, {}).update(slices)

    def problems(self, ranks: Sequence[RankHashes]) -> list[str]:
        """How what an engine's ranks report differs from what was sent; nothing of a model that is not understood."""
        sizes = sorted({of.ways for of in ranks})
        found = self.spoilt + [
            f"rank {rank} of {ways} is not among those that answered"
            for ways in sizes
            for rank in sorted(set(range(ways)) - {of.rank for of in ranks})
        ]
        for of in ranks:
            if self._strange(of) is None:
                found += self._problems(of)
        return found

    def limit(self, ranks: Sequence[RankHashes]) -> str | None:
        """What of an engine cannot be foretold, and why; None: every tensor of every rank is compared."""
        for of in ranks:
            if reason := self._strange(of):
                return reason
            for name in of.hashes:
                sent = name in self.hashes or (name in self.joined and not self._missing(name))
                if sent and not self._sent(name, of):
                    return f"there is no hash of {name}"
        return None

    def _strange(self, of: RankHashes) -> str | None:
        """Why it is not known what this rank must hold. One rank alone holds everything."""
        if not of.only_tensor_parallel:
            return "it has pipeline stages or data-parallel attention"
        if of.ways == 1:
            return None
        if of.ways not in self.slices:
            return f"slices for {of.ways} ranks were not hashed"
        for name in of.hashes:
            if parameter_named(name) is None and not _not_sent(name):
                return f"how ranks share {name} is not known here"
        for name in self.hashes:
            if parameter_with(name) is None:
                return f"where {name} goes is not known here"
        return None

    def _sent(self, name: str, of: RankHashes) -> set[str]:
        """Hashes of what was sent for a tensor of a rank: as SGLang keeps it, and as it is. Empty: unknown."""
        known = self.slices.get(of.ways, {}).get(name)
        found = {None if known is None else known[of.rank], self.hashes.get(name) if of.ways == 1 else None}
        return {value for value in found if value is not None}

    def _problems(self, of: RankHashes) -> list[str]:
        reported = of.hashes
        covered = {part for joined, parts in self.joined.items() if joined in reported for part in parts}
        at = {name: index for index, names in enumerate(self.buckets) for name in names}
        where = "" if of.ways == 1 else f"rank {of.rank} of {of.ways}: "
        found = []
        for name, index in at.items():
            if name in reported:
                found += self._misfit(name, of, f"{where}bucket {index}: {name}")
            elif name not in covered:
                found.append(f"{where}bucket {index}: {name} is not in the engine")
        for joined, parts in self.joined.items():
            if joined not in reported:
                continue
            came = sorted({at[part] for part in parts if part in at})
            buckets = f"bucket{'s' if len(came) > 1 else ''} {', '.join(map(str, came))}"
            label = f"{where}{buckets}: {joined} ({', '.join(map(_short, parts))})"
            missing = [f"{label}: {part} was not sent" for part in self._missing(joined)]
            found += missing or self._misfit(joined, of, label)
        sent = set(self.hashes) | set(self.joined)
        found += [f"{where}{name} was not sent" for name in reported if name not in sent and not _not_sent(name)]
        return found

    def _missing(self, joined: str) -> list[str]:
        return [part for part in self.joined[joined] if part not in self.hashes]

    def _misfit(self, name: str, of: RankHashes, label: str) -> list[str]:
        sent = self._sent(name, of)
        has = of.hashes[name]
        if not sent or has in sent:
            return []
        others = [rank for rank, value in enumerate(self.slices.get(of.ways, {}).get(name, ())) if value == has]
        hint = f", which is rank {others[0]}'s" if others else ""
        return [f"{label} is {has}{hint}, sent {' or '.join(sorted(sent))}"]


def _short(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _not_sent(name: str) -> bool:
    """An engine's tensors that no checkpoint has: tables computed from the config, and a head tied to the embedding."""
    return any(part in name for part in ("cos_sin_cache", "inv_freq")) or name == "lm_head.weight"
