"""metrics.jsonl: one JSON object an iteration, for scripts.

In: scalars by iteration. Out: `<run_dir>/metrics.jsonl`, each row `{"iteration": i, "<name>": value, ...}`. Sample
texts are left to the trajectory files, which hold all of them.

A value that is NaN or infinite is written as null, because JSON has neither. A resumed run overwrites: the first row
that it logs removes all later ones and takes the place of its own, of which the evaluation alone stays: that came
before the checkpoint and is not made again. What only the old row had (a cause of masking, `train/skipped`) is not so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl360.loggers.scalars import before_the_checkpoint

FILE = "metrics.jsonl"


class JsonlLogger:
    """protocols.Logger. A row is in the file when `log` returns."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._last: dict[str, Any] | None = None  # the row at the file's end
        self._last_offset = 0
        self._aligned = False

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._path = Path(run_dir) / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._aligned = False

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Add scalars to the iteration's row. Iterations must not decrease after the first call."""
        if not self._aligned:
            self._align(iteration)
            if self._last is not None and self._last["iteration"] == iteration:
                self._last = {"iteration": iteration, **before_the_checkpoint(self._last, scalars)}
        values = {name: _finite(value) for name, value in scalars.items()}
        with open(self._file(), "r+b") as file:
            if self._last is not None and self._last["iteration"] == iteration:
                self._last |= values
                file.seek(self._last_offset)
            else:
                self._last = {"iteration": iteration, **values}
                self._last_offset = file.seek(0, 2)
            file.write((json.dumps(self._last) + "\n").encode())
            file.truncate()

    def log_text(self, iteration: int, name: str, text: str) -> None:
        """Nothing: the trajectory files hold every text."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing: summary.json is the run's own."""

    def _file(self) -> Path:
        if self._path is None:
            raise RuntimeError("JsonlLogger.start() comes first")
        return self._path

    def _align(self, iteration: int) -> None:
        """Stand behind the last row that is not later than `iteration`; drop the rest, also a torn line."""
        offset = end = 0
        self._last = None
        with open(self._file(), "r+b") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n") or row["iteration"] > iteration:
                    break
                self._last, offset, end = row, end, end + len(line)
            file.truncate(end)
        self._last_offset = offset
        self._aligned = True


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
