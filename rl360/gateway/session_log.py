"""The proxy's own record of sessions: one JSON line each, apart from the ledger, so that counts can be checked.

In: a closed session. Out: a line in sessions.jsonl. The sampled ids themselves are in the trajectory file; here is
their sha256 (over little-endian int32), so that a recount can tell that they are the same.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np

from rl360.types import AttemptSpec, Segment, Session


class SessionLog:
    """Appends to one file; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def write(self, spec: AttemptSpec, session: Session, discarded: bool = False) -> None:
        """One line. `discarded`: the rollout did not take the session's tokens."""
        row = {
            "try_id": spec.try_id,
            "attempt_id": spec.attempt_id,
            "iteration": spec.iteration,
            "purpose": str(spec.purpose),
            "turns": len(session.turns),
            "segments": [_segment_row(segment) for segment in session.segments],
            "sampled_tokens": sum(int(s.loss_mask_T.sum()) for s in session.segments),
            "stop": None if session.stop is None else str(session.stop),
            "cause": session.cause,
            "truncated_turns": session.truncated_turns,
            "retries_deduplicated": session.retries_deduplicated,
            "engine_resends": session.engine_resends,
            "engine_moves": session.engine_moves,
            "engine_wait_s": round(session.engine_wait_s, 6),
            "discarded": discarded,
        }
        line = json.dumps(row, separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


def sampled_sha256(segment: Segment) -> str:
    """sha256 of the ids with mask 1, in order, as little-endian int32."""
    return hashlib.sha256(segment.token_ids_T[segment.loss_mask_T].astype(np.dtype("<i4")).tobytes()).hexdigest()


def _segment_row(segment: Segment) -> dict[str, object]:
    return {
        "tokens": int(segment.token_ids_T.size),
        "sampled_tokens": int(segment.loss_mask_T.sum()),
        "sampled_sha256": sampled_sha256(segment),
        "versions": sorted({span.version for span in segment.version_spans}),
        "parent": segment.parent,
        "fork_reason": segment.fork_reason,
    }
