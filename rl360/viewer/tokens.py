"""Tokens as they are shown: text, mask, logprob and weight version of each.

In: a segment's row and the run's tokenizer. Out: `Token`s. The tokenizer is looked for in the model folder of
resolved.yaml, then in the run's own exported checkpoint; without one, ids are shown. torch and transformers are not
needed.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 16  # decoded before the first token shown, so that it gets the text that it has in the sequence
MAX_PENDING = 8  # tokens that one character may be spread over; more is not UTF-8
# exp(-0.05) = 0.95, exp(-0.29) = 0.75, exp(-0.69) = 0.5, exp(-1.6) = 0.2, exp(-3) = 0.05, exp(-4.6) = 0.01.
LOGPROB_EDGES = (-0.05, -0.29, -0.69, -1.6, -3.0, -4.6)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a segment. `text` is None without a tokenizer; "" for all but the last token of one character."""

    position: int
    token_id: int
    text: str | None
    sampled: bool
    logprob: float | None  # None where the policy did not sample it
    version: int | None


def logprob_level(logprob: float) -> int:
    """0 (certain, probability 0.95 or more) to 6 (below 0.01)."""
    return sum(logprob < edge for edge in LOGPROB_EDGES)


class TokenTexts:
    """The run's tokenizer, loaded when first asked for. Thread-safe."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._looked = False
        self.problem: str | None = None  # why ids are shown

    def texts(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str] | None:
        """The text of each id; joined, they are the text of all. `before` are the ids in front of them. None: no
        tokenizer."""
        tokenizer = self._load()
        if tokenizer is None:
            return None
        return _pieces(tokenizer, [*before, *ids])[len(before) :]

    def _load(self) -> Tokenizer | None:
        with self._lock:
            if self._looked:
                return self._tokenizer
            self._looked = True
            try:
                from tokenizers import Tokenizer
            except ImportError:
                self.problem = "the package tokenizers is not installed"
                return None
            for folder in self._folders:
                if not (path := folder / "tokenizer.json").is_file():
                    continue
                try:
                    self._tokenizer = Tokenizer.from_file(str(path))
                except Exception as error:  # tokenizers raises Exception itself, whatever is wrong with the file
                    log.warning("%s: %s", path, error)
                    continue
                return self._tokenizer
            looked = ", ".join(str(folder) for folder in self._folders) or "no model folder in resolved.yaml"
            self.problem = f"no tokenizer.json: {looked}"
            return None


def model_folders(run_dir: Path, resolved: Mapping[str, Any]) -> list[Path]:
    """Where the run's tokenizer may be."""
    model, paths = resolved.get("model") or {}, resolved.get("paths") or {}
    folders = []
    if path := model.get("path"):
        folders.append(Path(str(path)))
    elif paths.get("models") and model.get("name"):
        folders.append(Path(str(paths["models"])) / str(model["name"]))
    return [*folders, run_dir / "checkpoints" / "hf"]


def segment_tokens(segment: Mapping[str, Any], texts: TokenTexts, start: int, end: int) -> list[Token]:
    """Tokens [start, end) of a segment as a trajectory row has it."""
    ids = segment["token_ids"][start:end]
    before = segment["token_ids"][max(0, start - CONTEXT_TOKENS) : start]
    pieces = texts.texts(ids, before)
    sampled = _marked(segment["sampled"], start, end)
    versions: list[int | None] = [None] * len(ids)
    for version, first, stop in segment["version_spans"]:
        for position in range(max(first, start), min(stop, start + len(ids))):
            versions[position - start] = version
    logprobs = np.frombuffer(base64.b64decode(segment["logprobs_f32le"]), dtype="<f4")[start:end].tolist()
    return [
        Token(
            position=start + i,
            token_id=token_id,
            text=None if pieces is None else pieces[i],
            sampled=sampled[i],
            logprob=logprobs[i] if sampled[i] else None,
            version=versions[i],
        )
        for i, token_id in enumerate(ids)
    ]


def _marked(runs: Sequence[Sequence[int]], start: int, end: int) -> list[bool]:
    marks = [False] * (end - start)
    for first, stop in runs:
        for position in range(max(first, start), min(stop, end)):
            marks[position - start] = True
    return marks


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of those before it. A character spread over tokens belongs to its last one."""
    pieces: list[str] = []
    begin = done = 0  # [begin, done) is the context whose text is taken off
    for at in range(len(ids)):
        known = tokenizer.decode(list(ids[begin:done]), skip_special_tokens=False)
        text = tokenizer.decode(list(ids[begin : at + 1]), skip_special_tokens=False)
        unfinished = text.endswith("\ufffd") and at + 1 - done < MAX_PENDING and at + 1 < len(ids)
        if unfinished:
            pieces.append("")
            continue
        pieces.append(text[len(known) :] if text.startswith(known) else _alone(tokenizer, ids[at]))
        begin, done = done, at + 1
    return pieces


def _alone(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False) or json.dumps(tokenizer.id_to_token(token_id))
