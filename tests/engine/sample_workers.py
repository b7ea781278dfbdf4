"""Worker classes that the tests of rl360.engine.workers start in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rl360.errors import ConfigError, EngineError


class OddError(Exception):
    """Cannot be pickled in the ordinary way, nor rebuilt: it holds a lambda."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hook = lambda: text


class Echo:
    def __init__(self, rank: int, folder: str, slow_close: bool = False) -> None:
        self.rank = rank
        self.folder = Path(folder)
        self.slow_close = slow_close
        self.started = False
        self.cancelled: list[str] = []

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        if self.slow_close:
            await asyncio.sleep(60)
        (self.folder / f"closed-{self.rank}").write_text("yes")

    def who(self) -> tuple[int, int, bool]:
        return self.rank, os.getpid(), self.started

    async def echo(self, value: Any, after_s: float = 0.0) -> Any:
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.cancelled.append(str(value))
            raise
        return value

    async def seen_cancelled(self) -> list[str]:
        return self.cancelled

    async def fail(self, kind: str) -> None:
        if kind == "config":
            raise ConfigError(["a: wrong", "b: wrong"])
        if kind == "engine":
            raise EngineError("engine_timeout", "no answer after 3 s")
        if kind == "odd":
            raise OddError("odd one")
        if kind == "timeout":
            raise TimeoutError("mine")
        raise ValueError(kind)

    def unpicklable(self) -> Any:
        return lambda: 1

    def loaded(self) -> list[str]:
        return sorted(name for name in ("torch", "harbor", "transformers", "hydra") if name in sys.modules)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def dispositions_of_a_child(self) -> str:
        """SIGTERM must end what a worker starts, though the worker itself outlives it."""
        child = subprocess.Popen(["sleep", "60"])
        child.terminate()
        return signal.Signals(-child.wait(10)).name

    def leave_a_child(self, hold_stream: bool = False) -> int:
        return subprocess.Popen(["sleep", "600"], close_fds=not hold_stream).pid

    def spin(self, seconds: float) -> None:
        time.sleep(seconds)

    def exit(self, code: int) -> None:
        print("last words", flush=True)
        os._exit(code)


class BadStart:
    def __init__(self, rank: int, how: str) -> None:
        self.rank = rank
        self.how = how

    async def start(self) -> None:
        if self.rank == 0:
            return
        if self.how == "raise":
            raise RuntimeError("no such template: qwen9")
        if self.how == "config":
            raise ConfigError("model.path: no such folder")
        if self.how == "hang":
            print("about to hang", flush=True)
            await asyncio.sleep(600)
        if self.how == "die":
            print("dying now", flush=True)
            os._exit(3)
