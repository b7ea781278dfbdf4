"""Stages of a benchmark that takes minutes: which one is at work, how long each took, and what is known so far.

In: names of stages, figures in a dict of the caller's. Out: lines on stderr with the seconds since the start; with a
path, the dict as a JSON file after every stage, whole or not at all, so that a program which is cut off has said where
it was and leaves what it had measured. Left to others: what the figures are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

LOG_TAIL = 4000  # characters
EXIT_OF_SIGTERM = 128 + signal.SIGTERM


class Progress:
    """Stages of one program.

    Args:
        found: gets `stages_s`, seconds by stage, and `ended_in` when an exception ends one; else the caller's.
        path: of the JSON file; None: no file.
    """

    def __init__(self, found: dict[str, Any], path: Path | None = None) -> None:
        self.found = found
        self._path = path
        self._began = time.perf_counter()
        self._stages: dict[str, float] = found.setdefault("stages_s", {})

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say that it begins and how long it took; then write the file."""
        self.say(f"{name} ...")
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.found["ended_in"] = f"{name}: {type(error).__name__} after {time.perf_counter() - began:.1f} s"
            self.say(self.found["ended_in"])
            self.write()
            raise
        self._stages[name] = round(time.perf_counter() - began, 3)
        self.say(f"{name}: {self._stages[name]:.1f} s")
        self.write()

    def write(self) -> None:
        if self._path is not None:
            beside = self._path.with_name(f".{self._path.name}.new")
            beside.write_text(json.dumps(self.found, indent=1) + "\n")
            os.replace(beside, self._path)


def show_logs(folder: Path) -> None:
    """The ends of worker processes' logs, on stderr."""
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-LOG_TAIL:]}", file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """SIGTERM, which `timeout` sends, ends the program as an exception does: files are written, processes ended."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(EXIT_OF_SIGTERM)

    signal.signal(signal.SIGTERM, end)
