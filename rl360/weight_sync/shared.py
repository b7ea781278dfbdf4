"""The embedded engine reads the trainer's own parameters: nothing moves, caches are dropped."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rl360.protocols import Gateway, Trainer
from rl360.types import SyncReport


class SharedSync:
    """Implements protocols.WeightSync for an engine in the trainer's process."""

    def __init__(self, embedded: Any) -> None:
        self._embedded = embedded

    def hold(self) -> AbstractContextManager[None]:
        """No forward runs inside: the trainer may change the weights in place."""
        return self._embedded.drain()

    def sync(self, trainer: Trainer, version: int) -> SyncReport:
        began = time.monotonic()
        self._embedded.set_version(version)
        return SyncReport(version, ("embedded",), (), 0.0, time.monotonic() - began)

    def check(self) -> None:
        """The engine lives as long as this process."""

    def resident(self, last: bool = False) -> AbstractContextManager[None]:
        """The trainer's memory is the engine's, always."""
        return nullcontext()

    def hold_requests_at(self, gateway: Gateway) -> None:
        """Nothing is paused here: the engine stands still between two of its steps."""

    def fingerprint(self) -> str | None:
        import hashlib

        from rl360.weight_sync.buckets import tensor_hash

        whole = hashlib.sha256()
        with self._embedded.still():
            for name, parameter in self._embedded.decoder.named_parameters():
                whole.update(f"{name} {tensor_hash(parameter.detach().cpu())} ".encode())
        return whole.hexdigest()

    def on_change(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        """The serving set is this one engine, always."""
