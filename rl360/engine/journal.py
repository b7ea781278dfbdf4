"""What became of each attempt, on disk: the journal of work in hand, and the trajectories of work that is decided.

In: finished attempts; later their outcomes. Out: `journal.jsonl.zst` (finished attempts since the last checkpoint, so
that a resume runs only what was open) and `trajectories/<iteration>.jsonl.zst` with a small index beside it. Left to
others: the outcome itself (loop) and the ledger's counts, which are recomputed from these files as a check.

A trajectory file has one row for every try, also for those that were requeued or never used: these have no segments.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl360.engine import frames
from rl360.engine.codec import FORMAT, attempt_from_json, attempt_to_json, plain, spec_to_json
from rl360.engine.ledger import ANOTHER_TRY_MAY_FOLLOW, Started, is_run_again
from rl360.errors import RL360Error
from rl360.types import Attempt, AttemptSpec, Outcome, OutcomeKind, Purpose

__all__ = ["Journal", "Trajectories", "attempt_from_json", "attempt_to_json"]

log = logging.getLogger(__name__)


class Journal:
    """Finished attempts that a resume would need again. Thread-safe; each append is on disk when it returns."""

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / "journal.jsonl.zst"
        self._lock = threading.Lock()
        self._mended = False

    def append(self, attempt: Attempt) -> None:
        frame = frames.pack(attempt_to_json(attempt))
        with self._lock:
            self._mend()
            frames.append(self.path, [frame])

    def read(self) -> list[Attempt]:
        """In the order in which they finished. A last record that a crash cut off is not among them."""
        with self._lock:
            if not self.path.exists():
                return []
            return [attempt_from_json(row) for _, _, row in frames.scan(self.path)]

    def forget_before(self, iteration: int, last_evaluated: int | None = None) -> None:
        """A checkpoint goes on with `iteration`: keep only what a resume from it would run again."""
        with self._lock:
            if not self.path.exists():
                return
            kept = [
                frames.pack(row)
                for _, _, row in frames.scan(self.path)
                if is_run_again(Purpose(row["spec"]["purpose"]), row["spec"]["iteration"], iteration, last_evaluated)
            ]
            frames.replace_file(self.path, b"".join(kept))
            self._mended = True

    def _mend(self) -> None:
        if not self._mended:
            frames.mend(self.path)
            self._mended = True


class Trajectories:
    """Rows of decided tries by iteration, each readable alone through the index. Writing is thread-safe.

    A row is `attempt_to_json` plus `"outcome": {"kind", "reason"}`; a try without an attempt has `spec`, `outcome` and
    `format` only. An index line has try_id, attempt_id, group_id, task_id, iteration, purpose, kind, reason, stop,
    cause, reward, success, turns, sampled_tokens, and offset, end: the bytes of the row's frame.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = Path(run_dir) / "trajectories"
        self._lock = threading.Lock()
        self._mended: set[int] = set()

    def path(self, iteration: int) -> Path:
        return self.folder / f"{iteration:05d}.jsonl.zst"

    def index_path(self, iteration: int) -> Path:
        return self.folder / f"{iteration:05d}.index.jsonl"

    def write(self, rows: Iterable[tuple[Attempt | AttemptSpec | Started, Outcome]]) -> None:
        """Append decided tries to the files of their own iterations; on disk when it returns.

        A try without an attempt is given by its spec, or by its ledger row when a crash took the spec.
        """
        by_iteration: dict[int, list[dict[str, Any]]] = {}
        for what, outcome in rows:
            spec = what.spec if isinstance(what, Attempt) else what
            if spec.try_id != outcome.try_id:
                raise RL360Error(f"trajectory of {spec.try_id} with the outcome of {outcome.try_id}")
            row = attempt_to_json(what) if isinstance(what, Attempt) else _stub(what)
            row = {**row, "outcome": {"kind": outcome.kind.value, "reason": outcome.reason}}
            by_iteration.setdefault(spec.iteration, []).append(row)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            for iteration, found in by_iteration.items():
                self._append(iteration, found)

    def iterations(self) -> list[int]:
        """Those that have a file, in order."""
        return sorted(int(path.name.split(".")[0]) for path in self.folder.glob("*.jsonl.zst"))

    def index(self, iteration: int) -> list[dict[str, Any]]:
        """Index lines of one iteration, without reading its attempts; the end that the index lacks is scanned."""
        lines = self._index_lines(iteration)
        start = lines[-1]["end"] if lines else 0
        path = self.path(iteration)
        if path.exists() and path.stat().st_size > start:
            lines += [_index_line(row, offset, end) for offset, end, row in frames.scan(path, start)]
        return lines

    def rows(self, iteration: int | None = None) -> Iterator[dict[str, Any]]:
        """Whole rows, one in memory at a time; of every iteration when none is named."""
        for one in self.iterations() if iteration is None else [iteration]:
            for _, _, row in frames.scan(self.path(one)):
                yield row

    def read_one(self, iteration: int, try_id: str) -> dict[str, Any]:
        """The row of one try. Raises KeyError when the iteration has none of that name."""
        for line in self.index(iteration):
            if line["try_id"] == try_id:
                return frames.read_one(self.path(iteration), line["offset"])
        raise KeyError(f"{self.path(iteration)} has no try {try_id}")

    def cut(self, resumed_iteration: int, last_evaluated: int | None = None) -> None:
        """Before a resume: drop the rows that it decides again, as `Ledger.rollback` does with their outcomes."""
        for iteration in self.iterations():
            if iteration < resumed_iteration:
                continue
            path = self.path(iteration)
            rows = [row for _, _, row in frames.scan(path)]
            kept = [row for row in rows if not _is_decided_again(row, resumed_iteration, last_evaluated)]
            self._mended.discard(iteration)
            self.index_path(iteration).unlink(missing_ok=True)
            frames.replace_file(path, b"".join(frames.pack(row) for row in kept))
            if not kept:
                path.unlink()

    # ---- inside

    def _append(self, iteration: int, rows: Sequence[dict[str, Any]]) -> None:
        path = self.path(iteration)
        if iteration not in self._mended:
            known = self._index_lines(iteration)
            frames.mend(path, known[-1]["end"] if known else 0)
            self._write_index(iteration, self.index(iteration), new=True)
            self._mended.add(iteration)
        packed = [frames.pack(row) for row in rows]
        offsets = frames.append(path, packed)
        lines = [
            _index_line(row, offset, offset + len(frame))
            for row, frame, offset in zip(rows, packed, offsets, strict=True)
        ]
        self._write_index(iteration, lines, new=False)

    def _write_index(self, iteration: int, lines: Iterable[dict[str, Any]], *, new: bool) -> None:
        # Never synced: what a crash loses is scanned again from the rows.
        with open(self.index_path(iteration), "w" if new else "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _index_lines(self, iteration: int) -> list[dict[str, Any]]:
        path = self.index_path(iteration)
        if not path.exists():
            return []
        size = self.path(iteration).stat().st_size if self.path(iteration).exists() else 0
        lines: list[dict[str, Any]] = []
        with open(path, encoding="utf-8") as file:
            for text in file:
                try:
                    line = json.loads(text)
                    if line["end"] > size:
                        break  # the index reached the disk and the row did not
                except (ValueError, KeyError):
                    break
                lines.append(line)
        return lines


def _stub(what: AttemptSpec | Started) -> dict[str, Any]:
    if isinstance(what, AttemptSpec):
        return {"format": FORMAT, "spec": spec_to_json(what)}
    return {"format": FORMAT, "spec": {**asdict(what), "purpose": what.purpose.value, "task": None}}


def _is_decided_again(row: dict[str, Any], resumed_iteration: int, last_evaluated: int | None) -> bool:
    final = OutcomeKind(row["outcome"]["kind"]) in ANOTHER_TRY_MAY_FOLLOW
    return not final and is_run_again(
        Purpose(row["spec"]["purpose"]), row["spec"]["iteration"], resumed_iteration, last_evaluated
    )


def _index_line(row: dict[str, Any], offset: int, end: int) -> dict[str, Any]:
    spec = row["spec"]
    sampled = sum(stop - start for segment in row.get("segments", ()) for start, stop in segment["sampled"])
    return {
        "try_id": spec["try_id"],
        "attempt_id": spec["attempt_id"],
        "group_id": spec["group_id"],
        "task_id": spec["task"]["task_id"] if spec["task"] else None,
        "iteration": spec["iteration"],
        "purpose": spec["purpose"],
        "kind": row["outcome"]["kind"],
        "reason": row["outcome"]["reason"],
        "stop": row.get("stop"),
        "cause": row.get("cause"),
        "reward": plain(row.get("reward")),
        "success": row.get("success"),
        "turns": len(row.get("turns", ())),
        "sampled_tokens": sampled,
        "offset": offset,
        "end": end,
    }
