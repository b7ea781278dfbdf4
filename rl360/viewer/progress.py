"""Work that is not decided yet, and whether the run is alive: from the ledger's end, the journal and the lock.

In: a run folder. Out: open tries, finished attempts among them, the run's state. Reads only: `Ledger` and `Journal`
mend the files that they open, which is for the run alone.

Only the last 16 MiB of the ledger are read. A try that started before and is still open is then not listed; at 300
bytes a row that would be a try that 50,000 others overtook.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl360.engine import frames
from rl360.engine.ledger import ANOTHER_TRY_MAY_FOLLOW, Started, is_run_again
from rl360.types import OutcomeKind, Purpose

OPEN = "open"  # what lists show in place of an outcome
LEDGER_TAIL_BYTES = 16 << 20
JOURNAL_BUDGET_S = 1.0  # of one request; a longer journal is read on by the next one
LOCKS = Path("/proc/locks")


class Progress:
    """What the run has in hand. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._ledger_stamp: object = None
        self._open: list[Started] = []
        self._journal_inode = 0
        self._journal_end = 0
        self._finished: dict[str, tuple[int, dict[str, Any]]] = {}  # try id -> offset of its record, its line

    def open_tries(self) -> list[Started]:
        """Tries that started and have no outcome, in the order in which they started."""
        path = self._run_dir / "ledger.jsonl"
        with self._lock:
            try:
                found = path.stat()
            except OSError:
                return []
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
            if stamp != self._ledger_stamp:
                self._open = _open_tries(path, found.st_size)
                self._ledger_stamp = stamp
            return self._open

    def finished_line(self, try_id: str) -> dict[str, Any] | None:
        """What an index line would say of a finished, undecided attempt, but for ids and outcome."""
        with self._lock:
            self._read_journal()
            found = self._finished.get(try_id)
        return None if found is None else found[1]

    def finished_row(self, try_id: str) -> dict[str, Any] | None:
        """The attempt's own row."""
        with self._lock:
            self._read_journal()
            found = self._finished.get(try_id)
        if found is None:
            return None
        try:
            row = frames.read_one(self._journal, found[0])
        except (OSError, ValueError):
            return None  # a checkpoint replaced the journal just now
        return row if row["spec"]["try_id"] == try_id else None

    def state(self) -> str:
        """`running`, the summary's exit reason, or `stopped` when a run ended without writing one."""
        if self._is_held():
            return "running"
        return str(self.summary().get("exit_reason", "stopped"))

    def summary(self) -> Mapping[str, Any]:
        try:
            found = json.loads((self._run_dir / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # ---- inside

    @property
    def _journal(self) -> Path:
        return self._run_dir / "journal.jsonl.zst"

    def _read_journal(self) -> None:
        try:
            found = self._journal.stat()
        except OSError:
            self._finished.clear()
            return
        if found.st_ino != self._journal_inode or found.st_size < self._journal_end:
            self._finished.clear()
            self._journal_inode, self._journal_end = found.st_ino, 0
        if found.st_size == self._journal_end:
            return
        deadline = time.monotonic() + JOURNAL_BUDGET_S
        for offset, end, row in frames.scan(self._journal, self._journal_end):
            self._finished[row["spec"]["try_id"]] = (offset, _line(row))
            self._journal_end = end
            if time.monotonic() > deadline:
                break

    def _is_held(self) -> bool:
        """Whether a process of this machine holds the run's lock; asked of the kernel without touching the lock."""
        path = self._run_dir / ".lock"
        try:
            inode, holder = str(path.stat().st_ino), path.read_text().strip()
            locks = LOCKS.read_text()
        except OSError:
            return False
        # "7: FLOCK  ADVISORY  WRITE 4242 08:01:131 0 EOF". The device is not compared: some file systems report another
        # one there than stat does.
        held = [words for words in map(str.split, locks.splitlines()) if len(words) > 5 and words[1] == "FLOCK"]
        return any(words[4] == holder and words[5].rpartition(":")[2] == inode for words in held)


def _open_tries(path: Path, size: int) -> list[Started]:
    started: dict[str, Started] = {}
    outcomes: dict[str, Mapping[str, Any]] = {}
    with open(path, "rb") as file:
        if size > LEDGER_TAIL_BYTES:
            file.seek(size - LEDGER_TAIL_BYTES)
            file.readline()  # the rest of a row
        for text in file:
            try:
                row = json.loads(text)
            except ValueError:
                break  # being written, or cut off by a crash
            match row["event"]:
                case "started":
                    ids = row["try_id"], row["attempt_id"], row["group_id"], row["iteration"]
                    one = Started(*ids, Purpose(row["purpose"]), row["try_number"], row["retry_of"])
                    started[one.try_id] = one
                case "outcome":
                    outcomes[row["try_id"]] = row
                case "rollback":
                    again = [try_id for try_id, o in outcomes.items() if _is_open_again(o, row)]
                    for try_id in again:
                        del outcomes[try_id]
    return [one for try_id, one in started.items() if try_id not in outcomes]


def _is_open_again(outcome: Mapping[str, Any], rollback: Mapping[str, Any]) -> bool:
    """As `Ledger` decides it."""
    if OutcomeKind(outcome["kind"]) in ANOTHER_TRY_MAY_FOLLOW:
        return False
    purpose = Purpose(outcome["purpose"])
    return is_run_again(purpose, outcome["iteration"], rollback["iteration"], rollback.get("last_evaluated"))


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    sampled = sum(stop - start for segment in row["segments"] for start, stop in segment["sampled"])
    return {
        "task_id": row["spec"]["task"]["task_id"],
        "stop": row["stop"],
        "cause": row["cause"],
        "reward": row["reward"],
        "success": row["success"],
        "turns": len(row["turns"]),
        "sampled_tokens": sampled,
    }
