"""Keys and values of everything the engine has computed: one rectangle for running rows, and finished sequences kept
for reuse, together inside one budget.

In: which row holds which tokens. Out: per-layer tensors that attention reads and writes in place. Which request runs
when is left to the engine. Axes: R rows, K key/value heads, W token places of a row, D head width.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl360.errors import ConfigError
from rl360.models.decoder import DecoderConfig

# Rows get places in steps of this many tokens, so that a slightly longer request does not lay everything out anew.
WIDTH_STEP = 64
# A shared beginning shorter than this is computed again: copying and bookkeeping would cost as much.
MIN_SHARED_TOKENS = 8


def shared_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Number of equal leading tokens."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


@dataclass(slots=True, eq=False)
class Kept:
    """A finished sequence: its tokens and, per layer, keys and values [2, K, tokens, D]."""

    tokens: NDArray[np.int64]
    layers: list[Tensor]


class KVCache:
    """`layers[i]` is [2, R, K, W, D]: keys, then values. Row r of all layers belongs to one running request.

    Unused places hold zeros or old finite values, never NaN, because masked attention still multiplies by them.
    """

    def __init__(
        self, config: DecoderConfig, budget_gib: float, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._dtype, self._device = dtype, device
        self._max_rows = max_rows
        self.token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.capacity_tokens = int(budget_gib * 2**30) // self.token_bytes
        if self.capacity_tokens < WIDTH_STEP:
            raise ConfigError(
                f"rollout.kv_cache_gib: {budget_gib} holds {self.capacity_tokens} tokens of this model; expected at "
                f"least {WIDTH_STEP}; try {2 * WIDTH_STEP * self.token_bytes / 2**30:.3f}"
            )
        self.rows = self.width = 0
        self.layers: list[Tensor] = []
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # least recently used first
        self._kept_tokens = 0
        self.evictions = 0

    @property
    def longest_row(self) -> int:
        """The most tokens that one request may have, prompt and output together."""
        return self.capacity_tokens // WIDTH_STEP * WIDTH_STEP

    @property
    def used_tokens(self) -> int:
        """Token places allocated now, for rows and for kept sequences."""
        return self.rows * self.width + self._kept_tokens

    @torch.inference_mode()
    def reserve(self, rows: int, width: int, wanted_rows: int, lengths: list[int]) -> bool:
        """Make room for `rows` rows of `width` tokens, keeping the first `lengths[r]` tokens of present rows.

        Takes room for up to `wanted_rows` if the budget has it, and drops kept sequences as needed, the least recently
        used first. False (and nothing changed) when it cannot fit beside nothing else.
        """
        width = -(-width // WIDTH_STEP) * WIDTH_STEP
        if rows <= self.rows and width <= self.width:
            return True
        if rows * width > self.capacity_tokens:
            return False
        rows = max(rows, min(wanted_rows, self._max_rows, self.capacity_tokens // width))
        while self._kept and rows * width + self._kept_tokens > self.capacity_tokens:
            self._evict()
        self._lay_out(rows, width, lengths)
        return True

    def _lay_out(self, rows: int, width: int, lengths: list[int]) -> None:
        # One layer at a time: old and new memory of only one layer exist together.
        shape = (2, rows, self._config.num_kv_heads, width, self._config.head_dim)
        layers, self.layers = self.layers, []
        self.rows, self.width = rows, width
        for index in range(self._config.num_layers):
            fresh = torch.zeros(shape, dtype=self._dtype, device=self._device)
            if layers:
                old, layers[index] = layers[index], None  # type: ignore[call-overload]
                for row, length in enumerate(lengths):
                    fresh[:, row, :, :length].copy_(old[:, row, :, :length])
            self.layers.append(fresh)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        if source != target and length:
            for layer in self.layers:
                layer[:, target, :, :length].copy_(layer[:, source, :, :length])

    @torch.inference_mode()
    def swap_rows(self, first: int, second: int, length: int) -> None:
        for layer in self.layers:
            held = layer[:, first, :, :length].clone()
            layer[:, first, :, :length].copy_(layer[:, second, :, :length])
            layer[:, second, :, :length].copy_(held)

    @torch.inference_mode()
    def shrink(self, lengths: list[int], tokens: int) -> None:
        """Give up unused rows if the budget has no room to keep `tokens` more; `lengths` are those of rows in use."""
        if self.rows * self.width + tokens > self.capacity_tokens and len(lengths) < self.rows:
            self._lay_out(len(lengths), self.width, lengths)

    @torch.inference_mode()
    def keep(self, row: int, tokens: NDArray[np.int64]) -> None:
        """Copy the row's first `tokens.size` tokens aside for later requests, if the budget has room."""
        size = tokens.size
        if size < MIN_SHARED_TOKENS or self.rows * self.width + size > self.capacity_tokens:
            return
        for key, kept in list(self._kept.items()):  # what the new one begins with needs no copy of its own
            if kept.tokens.size <= size and shared_prefix(kept.tokens, tokens) == kept.tokens.size:
                self._drop(key)
        while self.used_tokens + size > self.capacity_tokens:
            self._evict()
        kept = Kept(tokens.copy(), [layer[:, row, :, :size].clone() for layer in self.layers])
        self._kept[id(kept)] = kept
        self._kept_tokens += size

    def find(self, tokens: NDArray[np.int64]) -> tuple[int | None, int]:
        """(key, n): the kept sequence that shares the most leading tokens, n of them; (None, 0) without one."""
        best: int | None = None
        best_size = 0
        for key, kept in self._kept.items():
            size = shared_prefix(kept.tokens, tokens)
            if size > best_size:
                best, best_size = key, size
        return best, best_size

    @torch.inference_mode()
    def restore(self, key: int, row: int, length: int) -> None:
        """Copy the first `length` tokens of a kept sequence into a row."""
        kept = self._kept[key]
        self._kept.move_to_end(key)
        for layer, saved in zip(self.layers, kept.layers, strict=True):
            layer[:, row, :, :length].copy_(saved[:, :, :length])

    def forget(self) -> None:
        """Drop every kept sequence. Rows keep their memory; their contents are the engine's to give up."""
        self._kept.clear()
        self._kept_tokens = 0

    def release(self) -> None:
        """Give the rows' memory back. Only when no row is in use."""
        self.rows = self.width = 0
        self.layers = []

    def _evict(self) -> None:
        self._drop(next(iter(self._kept)))
        self.evictions += 1

    def _drop(self, key: int) -> None:
        self._kept_tokens -= self._kept.pop(key).tokens.size
