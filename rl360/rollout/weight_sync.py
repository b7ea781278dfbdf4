"""How new weights reach the engines: shared memory with the embedded engine, or a checkpoint on disk.

In: the trainer after its step, and the version that its weights now have. Out: a `SyncReport`; the caller advances the
version only when every engine of the serving set confirmed. The prefix cache never survives a version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rl360.errors import EngineError
from rl360.protocols import Engine, Trainer
from rl360.types import SyncReport


class SharedSync:
    """The embedded engine reads the trainer's own parameters: nothing moves, caches are dropped."""

    def __init__(self, embedded: Any):
        self._embedded = embedded

    def hold(self) -> AbstractContextManager[None]:
        """No forward runs inside: the trainer may change the weights in place."""
        return self._embedded.drain()

    def sync(self, trainer: Trainer, version: int) -> SyncReport:
        began = time.monotonic()
        self._embedded.set_version(version)
        return SyncReport(version, ("embedded",), (), 0.0, time.monotonic() - began)


class DiskSync:
    """Write an HF folder, pause every engine, load it there, flush, check the version, continue.

    `make_engine` builds a client inside the event loop that uses it. A failed load raises `EngineError`: the engines
    stay paused, and the version does not advance.
    """

    def __init__(self, engine_urls: Sequence[str], folder: Path, make_engine: Callable[[str], Engine]):
        self._urls = tuple(engine_urls)
        self._folder = folder
        self._make_engine = make_engine

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, trainer: Trainer, version: int) -> SyncReport:
        began = time.monotonic()
        path = trainer.publish(self._folder / f"version-{version}")
        stall_began = time.monotonic()
        asyncio.run(self._load_everywhere(path, version))
        done = time.monotonic()
        for old in self._folder.glob("version-*"):
            if old != path:
                _remove_tree(old)
        return SyncReport(version, self._urls, (), done - began, done - stall_began)

    async def _load_everywhere(self, path: Path, version: int) -> None:
        engines = [self._make_engine(url) for url in self._urls]
        try:
            await asyncio.gather(*(engine.pause() for engine in engines))
            await asyncio.gather(*(engine.load(path, version) for engine in engines))
            for engine in engines:
                served = (await engine.info()).get("weight_version")
                if str(served) != str(version):
                    raise EngineError(
                        "weight_version", f"{engine.url} serves version {served!r} after loading {version}"
                    )
            await asyncio.gather(*(engine.resume() for engine in engines))
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))


def _remove_tree(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
