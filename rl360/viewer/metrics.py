"""metrics.jsonl by iteration: a few columns of all rows, all columns of one.

In: a run folder. Out: numbers by iteration. The file is read again, whole, when it changed: a resumed run rewrites it
from the middle, and 1,000 iterations are 1.4 MB. What a crash left at its end is not a row.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl360.loggers.jsonl import FILE

REWARD, SUCCESS, EVALUATED = "reward/unfiltered_mean", "reward/success_rate", "eval/success_rate"
COLUMNS = (REWARD, SUCCESS, EVALUATED, "rollout/response_tokens_mean", "time/step_s")


class Metrics:
    """Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._lock = threading.Lock()
        self._stamp: object = None
        self._rows: dict[int, dict[str, float | None]] = {}
        self._offsets: dict[int, int] = {}

    def columns(self) -> Mapping[int, Mapping[str, float | None]]:
        """COLUMNS of every iteration that has them."""
        with self._lock:
            self._read()
            return dict(self._rows)

    def row(self, iteration: int) -> dict[str, Any]:
        """Everything that was logged for one iteration; empty when there is nothing."""
        with self._lock:
            self._read()
            if iteration not in self._offsets:
                return {}
            try:
                with open(self._path, "rb") as file:
                    file.seek(self._offsets[iteration])
                    return json.loads(file.readline())
            except (OSError, ValueError):
                return {}

    def _read(self) -> None:
        try:
            found = self._path.stat()
        except OSError:
            return
        stamp = found.st_ino, found.st_mtime_ns, found.st_size
        if stamp == self._stamp:
            return
        self._stamp = stamp
        rows: dict[int, dict[str, float | None]] = {}
        offsets: dict[int, int] = {}
        start = 0
        with open(self._path, "rb") as file:
            while line := file.readline():
                try:
                    row = json.loads(line)
                    iteration = int(row["iteration"])
                except (ValueError, KeyError, TypeError):
                    break
                rows[iteration] = {name: row[name] for name in COLUMNS if name in row}
                offsets[iteration] = start
                start += len(line)
        self._rows, self._offsets = rows, offsets
