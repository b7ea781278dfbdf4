"""What the pages ask of a run folder, answered without loading it.

In: a run folder that may be large, still written to, interrupted or copied from elsewhere. Out: lines (one a try, from
the index beside each trajectory file), whole rows one at a time, counts by iteration. Nothing is ever written. Left to
others: what a row says (rl360.engine.codec), work that is not decided yet (progress.py), numbers (metrics.py).

An index line is about 400 bytes where a row may be a megabyte; only lines are kept, and only of the iterations looked
at last.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from rl360.engine import frames
from rl360.engine.codec import restored
from rl360.engine.journal import Trajectories
from rl360.types import Purpose
from rl360.viewer.progress import OPEN, Progress

KEPT_LINES = 100_000  # of all cached iterations together: about 60 MB
UNASKED_SCAN_BYTES = 4 << 20  # of rows without an index line that a list of iterations reads: 0.2 s
HEAD_BYTES = 1 << 16  # compressed bytes read at a time where only the beginning of a row is wanted
INDEX_TAIL_BYTES = 1 << 14  # holds the last index line
_ROW_BEGINS = '{"format":1,"spec":'


@dataclass(frozen=True, slots=True)
class Line:
    """One try in a list. `kind` is an outcome, or "open" while there is none; `offset` is None outside the files."""

    try_id: str
    attempt_id: str
    group_id: str
    task_id: str | None
    iteration: int
    purpose: str
    kind: str
    reason: str | None
    stop: str | None
    cause: str | None
    reward: float | None
    success: bool | None
    turns: int
    sampled_tokens: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one iteration. Means are over training tries with a reward, None when there is none."""

    tries: int
    by_kind: Mapping[str, int]
    reward_mean: float | None
    success_rate: float | None
    groups: int
    complete: bool = True  # False: rows without an index line were left unread


class Source:
    """One run folder. Thread-safe; reading the same thing twice at the same time costs time only."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.trajectories = Trajectories(self.run_dir)
        self.progress = Progress(self.run_dir)
        self._lock = threading.Lock()
        self._lines: OrderedDict[int, tuple[object, list[Line]]] = OrderedDict()
        self._totals: dict[int, tuple[object, Totals]] = {}
        self._tags: dict[str, tuple[str, ...]] = {}

    def iterations(self) -> list[int]:
        """Those with decided tries and those with open ones, in order."""
        found = set(self.trajectories.iterations()) if self.trajectories.folder.is_dir() else set()
        return sorted(found | {one.iteration for one in self.progress.open_tries()})

    def lines(self, iteration: int) -> list[Line]:
        """Every try of the iteration: training before evaluation, by group, member and try."""
        return sorted([*self._decided(iteration), *self._open(iteration)], key=_order)

    def totals(self, iteration: int, may_scan: bool = True) -> Totals:
        """Counts of the decided tries, from the index. What it lacks is read when it is little and `may_scan`."""
        stamp = self._stamp(iteration)
        with self._lock:
            known = self._totals.get(iteration)
        if known is not None and known[0] == stamp:
            return known[1]
        if self._unindexed_bytes(iteration) > (UNASKED_SCAN_BYTES if may_scan else 0):
            return Totals(0, {}, None, None, 0, complete=False)
        totals = _count(self._decided(iteration))
        with self._lock:
            self._totals[iteration] = (stamp, totals)
        return totals

    def tags(self, line: Line) -> tuple[str, ...]:
        """The tags of the line's task, read once a task from the beginning of one of its rows."""
        if line.task_id is None:
            return ()
        if line.task_id not in self._tags:
            if line.offset is None:
                return ()
            spec = _spec_at(self.trajectories.path(line.iteration), line.offset)
            task = spec.get("task") or {}
            self._tags[line.task_id] = tuple(str(tag) for tag in task.get("tags") or ())
        return self._tags[line.task_id]

    def row(self, iteration: int, try_id: str) -> dict[str, Any]:
        """The whole row of one try, `$float`s restored; without "outcome" when it is not decided. Raises KeyError."""
        path = self.trajectories.path(iteration)
        for line in self._decided(iteration):
            if line.try_id == try_id and line.offset is not None:
                row = frames.read_one(path, line.offset)
                if row["spec"]["try_id"] == try_id:  # else the file was replaced between the two reads
                    return restored(row)
        if (found := self.progress.finished_row(try_id)) is not None:
            return restored(found)
        raise KeyError(try_id)

    # ---- inside

    def _decided(self, iteration: int) -> list[Line]:
        stamp = self._stamp(iteration)
        with self._lock:
            known = self._lines.get(iteration)
            if known is not None and known[0] == stamp:
                self._lines.move_to_end(iteration)
                return known[1]
        lines = [as_line(entry) for entry in self.trajectories.index(iteration)]
        with self._lock:
            self._lines[iteration] = (stamp, lines)
            self._lines.move_to_end(iteration)
            while len(self._lines) > 1 and sum(len(kept) for _, kept in self._lines.values()) > KEPT_LINES:
                self._lines.popitem(last=False)
        return lines

    def _open(self, iteration: int) -> list[Line]:
        decided = {line.try_id for line in self._decided(iteration)}
        lines = []
        for one in self.progress.open_tries():
            if one.iteration != iteration or one.try_id in decided:
                continue
            entry = self.progress.finished_line(one.try_id)
            empty = dict.fromkeys(
                ("task_id", "reason", "stop", "cause", "reward", "success", "turns", "sampled_tokens")
            )
            ids = {
                "try_id": one.try_id,
                "attempt_id": one.attempt_id,
                "group_id": one.group_id,
                "iteration": one.iteration,
                "purpose": one.purpose.value,
            }
            lines.append(as_line({**empty, **(entry or {}), **ids, "kind": OPEN, "offset": None}))
        return lines

    def _stamp(self, iteration: int) -> object:
        """Changes whenever the iteration's files do."""
        return tuple(_stat(p) for p in (self.trajectories.path(iteration), self.trajectories.index_path(iteration)))

    def _unindexed_bytes(self, iteration: int) -> int:
        size = _stat(self.trajectories.path(iteration))[2]
        try:
            with open(self.trajectories.index_path(iteration), "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - INDEX_TAIL_BYTES))
                last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
            return max(0, size - int(json.loads(last)["end"]))
        except (OSError, ValueError, KeyError, TypeError):
            return size  # no index, or one with a torn end: as if there were none


def as_line(entry: Mapping[str, Any]) -> Line:
    """From an index line. Strings that repeat are kept once."""

    def name(key: str) -> str:
        return sys.intern(str(entry[key]))

    def maybe(key: str) -> str | None:
        return None if entry[key] is None else name(key)

    reward = restored(entry["reward"])
    return Line(
        try_id=str(entry["try_id"]),
        attempt_id=name("attempt_id"),
        group_id=name("group_id"),
        task_id=maybe("task_id"),
        iteration=int(entry["iteration"]),
        purpose=name("purpose"),
        kind=name("kind"),
        reason=maybe("reason"),
        stop=maybe("stop"),
        cause=maybe("cause"),
        reward=None if reward is None else float(reward),
        success=entry["success"],
        turns=int(entry["turns"] or 0),
        sampled_tokens=int(entry["sampled_tokens"] or 0),
        offset=entry["offset"],
    )


def _order(line: Line) -> tuple[bool, str, tuple[int, str], str]:
    """Members by number: `...-10` comes after `...-9`."""
    return line.purpose == Purpose.EVAL.value, line.group_id, (len(line.attempt_id), line.attempt_id), line.try_id


def _count(lines: list[Line]) -> Totals:
    training = [line for line in lines if line.purpose == Purpose.TRAIN.value]
    rewards = [line.reward for line in training if line.reward is not None]
    verdicts = [line.success for line in training if line.success is not None]
    return Totals(
        tries=len(lines),
        by_kind=Counter(line.kind for line in lines),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        success_rate=sum(verdicts) / len(verdicts) if verdicts else None,
        groups=len({line.group_id for line in lines}),
    )


def _spec_at(path: Path, offset: int) -> Mapping[str, Any]:
    """The `spec` of the row at `offset`. It stands first in the row: the rest is not even decompressed."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    text = b""
    with open(path, "rb") as file:
        file.seek(offset)
        while not decoder.eof and (chunk := file.read(HEAD_BYTES)):
            text += decoder.decompress(chunk)
            begin = text.decode("utf-8", "ignore")
            if not begin.startswith(_ROW_BEGINS[: len(begin)]):
                break
            try:
                return json.JSONDecoder().raw_decode(begin, len(_ROW_BEGINS))[0]
            except ValueError:
                continue  # it goes on in the next block
    return frames.read_one(path, offset)["spec"]


def _stat(path: Path) -> tuple[int, int, int]:
    """Inode, time of change, size; zeros when there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
