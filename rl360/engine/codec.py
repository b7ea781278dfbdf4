"""Attempts as JSON and back, exactly.

In: an `Attempt`. Out: a JSON-able dict that a viewer reads without this module, and from which the same attempt is
built again, bit for bit. Left to others: files (journal.py).

Token ids are a list of ints. The loss mask is a list of [start, end) runs of sampled tokens. Logprobs are base64 of
little-endian float32, because decimal text of a float32 is larger and JSON has no NaN. Other floats are JSON numbers,
which Python writes so that they read back exactly; NaN and infinity become {"$float": "nan" | "inf" | "-inf"}.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from rl360.types import (
    Attempt,
    AttemptSpec,
    Purpose,
    Sampling,
    Score,
    Segment,
    Stop,
    Task,
    Timings,
    TrialResult,
    Turn,
    VersionSpan,
)

FORMAT = 1  # grows when a reader of this format could no longer read a row


def attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    """Everything of the attempt; `reward`, `success` and `valid` are added for readers and ignored on the way back."""
    return {
        "format": FORMAT,
        "spec": spec_to_json(attempt.spec),
        "stop": attempt.stop.value,
        "cause": attempt.cause,
        "valid": attempt.valid,
        "reward": plain(attempt.reward),
        "success": attempt.success,
        "scores": {name: _record(score) for name, score in attempt.scores.items()},
        "truncated_turns": attempt.truncated_turns,
        "timings": _record(attempt.timings),
        "turns": [_record(turn) for turn in attempt.turns],
        "segments": [_segment_to_json(segment) for segment in attempt.segments],
        "trial": None if attempt.trial is None else _record(attempt.trial),
    }


def attempt_from_json(row: Mapping[str, Any]) -> Attempt:
    """Raises ValueError on a row of a later format, KeyError on one that is not an attempt."""
    if row["format"] > FORMAT:
        raise ValueError(f"attempt of format {row['format']}; this version reads up to {FORMAT}")
    return Attempt(
        spec=spec_from_json(row["spec"]),
        segments=tuple(_segment_from_json(segment) for segment in row["segments"]),
        turns=tuple(_turn_from_json(turn) for turn in row["turns"]),
        scores={name: Score(**restored(score)) for name, score in row["scores"].items()},
        stop=Stop(row["stop"]),
        cause=row["cause"],
        timings=Timings(**restored(row["timings"])),
        trial=None if row["trial"] is None else _trial_from_json(row["trial"]),
        truncated_turns=row["truncated_turns"],
    )


def spec_to_json(spec: AttemptSpec) -> dict[str, Any]:
    return {"try_id": spec.try_id, **_record(spec)}


def spec_from_json(row: Mapping[str, Any]) -> AttemptSpec:
    task, sampling = restored(row["task"]), restored(row["sampling"])
    return AttemptSpec(
        attempt_id=row["attempt_id"],
        group_id=row["group_id"],
        iteration=row["iteration"],
        task=Task(task["task_id"], Path(task["path"]), tuple(task["tags"]), task["content_hash"]),
        sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}),
        seed=row["seed"],
        purpose=Purpose(row["purpose"]),
        try_number=row["try_number"],
        retry_of=row["retry_of"],
    )


def plain(value: Any) -> Any:
    """JSON-able copy of free-form data (messages, agent metadata). What JSON cannot hold becomes its repr."""
    match value:
        case Enum():
            return plain(value.value)
        case None | bool() | str():
            return value
        case int() | np.integer():
            return int(value)
        case float() | np.floating():
            number = float(value)
            return number if math.isfinite(number) else {"$float": str(number)}
        case np.bool_():
            return bool(value)
        case Path():
            return str(value)
        case Timings() | Task() | Sampling():
            return _record(value)
        case np.ndarray():
            return plain(value.tolist())
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
        case _:
            return repr(value)


def restored(value: Any) -> Any:
    """The inverse of `plain` for what JSON lacks."""
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return value


def _record(record: Any) -> dict[str, Any]:
    return {f.name: plain(getattr(record, f.name)) for f in fields(record)}


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    logprobs = np.ascontiguousarray(segment.logprobs_T, dtype="<f4")
    return {
        "token_ids": segment.token_ids_T.tolist(),
        "sampled": _runs(segment.loss_mask_T),
        "logprobs_f32le": base64.b64encode(logprobs.tobytes()).decode("ascii"),
        "version_spans": [[span.version, span.start, span.end] for span in segment.version_spans],
        "parent": segment.parent,
        "fork_reason": segment.fork_reason,
    }


def _segment_from_json(row: Mapping[str, Any]) -> Segment:
    token_ids_T = np.array(row["token_ids"], dtype=np.int32)
    loss_mask_T = np.zeros(len(token_ids_T), dtype=np.bool_)
    for start, end in row["sampled"]:
        loss_mask_T[start:end] = True
    logprobs_T = np.frombuffer(base64.b64decode(row["logprobs_f32le"]), dtype="<f4").astype(np.float32)
    spans = tuple(VersionSpan(*span) for span in row["version_spans"])
    return Segment(token_ids_T, loss_mask_T, logprobs_T, spans, row["parent"], row["fork_reason"])


def _runs(mask_T: np.ndarray) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask_T.astype(bool), [False]))))
    return edges.reshape(-1, 2).tolist()


def _turn_from_json(row: Mapping[str, Any]) -> Turn:
    turn = restored(row)
    messages: Sequence[Mapping[str, object]] = turn["request_messages"]
    return Turn(**{**turn, "request_messages": tuple(messages)})


def _trial_from_json(row: Mapping[str, Any]) -> TrialResult:
    trial = restored(row)
    return TrialResult(**{**trial, "timings": Timings(**trial["timings"]), "trial_dir": Path(trial["trial_dir"])})
