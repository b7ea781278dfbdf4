"""When generated text ends a request: stop strings and regular expressions, also across token boundaries.

In: a model folder's tokenizer; the sampled ids of one request, one at a time. Out: the ids that end a text, whether a
stop matched, and the final text. Acting on end tokens and length caps is left to the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]  # what `re` itself compiles with
from typing import Any, Protocol

from rl360.errors import ConfigError
from rl360.gateway.embedded.sampling import SamplingParams

# What a decoder puts where bytes do not form a whole character yet.
INCOMPLETE = "\ufffd"
_MOST_TAIL = 4096  # characters; searching a longer tail for each token saves nothing over the suffix


class Decodes(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class _Pattern:
    """A regular expression that is looked for in a text that grows, where a new match can be and nowhere else."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.compiled = re.compile(pattern)
        self._longest: int | None = None  # characters of a match; None: no bound, or one that is no use
        self._suffix = ""  # what every match ends with, as far as it is known
        looks_ahead = "(?=" in pattern or "(?!" in pattern  # text that comes later can make a match of what was there
        if not looks_ahead:
            tree = _parser.parse(pattern)
            longest = tree.getwidth()[1]
            self._longest = longest if longest <= _MOST_TAIL else None
            if not self.compiled.flags & re.IGNORECASE:
                self._suffix = _suffix_of(tree)

    def matches(self, text: str, known: int) -> bool:
        """Whether `text` has a match, given that its first `known` characters, which have not changed, had none."""
        if self._longest is not None:
            return self.compiled.search(text, max(0, known - self._longest)) is not None
        if self._suffix and text.find(self._suffix, max(0, known - len(self._suffix) + 1)) < 0:
            return False
        return self.compiled.search(text) is not None


def _suffix_of(tree: Any) -> str:
    """The characters that a parsed expression ends with, when those are plain ones."""
    suffix = ""
    for operation, argument in reversed(list(tree)):
        if operation is not _constants.LITERAL:
            break
        suffix = chr(argument) + suffix
    return suffix


class StopWatch:
    """Watches the text of one request grow.

    Only the last few ids are decoded again for each token: decoding is not a concatenation, so a settled id before the
    new ones gives them their context (its text is subtracted). Only the end of the text is searched for each token,
    unless a pattern without a longest match may have been completed.
    """

    def __init__(self, tokenizer: Decodes, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._strings = params.stop
        self._patterns = [_Pattern(pattern) for pattern in params.stop_regex]
        self._longest = max((len(s) for s in self._strings), default=0)
        self._text = ""  # of whole characters so far
        self._context = 0  # ids [context, settled) are decoded only as context
        self._settled = 0
        self._context_text = ""

    def add(self, output_ids: list[int]) -> str | None:
        """Look at the text after a new last id. Returns the string or the pattern that matched, else None."""
        window = self._tokenizer.decode(output_ids[self._context :], skip_special_tokens=False)
        fresh = window[len(self._context_text) :]
        known = len(self._text)
        text = self._text + fresh
        if not fresh.endswith(INCOMPLETE):
            self._context, self._settled = self._settled, len(output_ids)
            self._context_text = self._tokenizer.decode(output_ids[self._context :], skip_special_tokens=False)
            self._text = text
        for string in self._strings:
            if text.find(string, max(0, known - self._longest)) >= 0:
                return string
        for pattern in self._patterns:
            if pattern.matches(text, known):
                return pattern.pattern
        return None


def final_text(tokenizer: Decodes, output_ids: list[int], params: SamplingParams, matched: object) -> str:
    """`text` of the reply, as SGLang trims it: without the matched stop token and from the matched string on.

    A matched regular expression is not trimmed, nor is anything with `no_stop_trim`.
    """
    ids = output_ids
    if isinstance(matched, int) and not params.no_stop_trim and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if isinstance(matched, str) and not params.no_stop_trim and matched in params.stop:
        at = text.find(matched)
        text = text[:at] if at >= 0 else text
    return text


def read_tokenizer(folder: Path | None, eos_token_ids: Iterable[int]) -> tuple[Any, frozenset[int]]:
    """The tokenizer (None without a folder), and every id that ends a text: of the model, its generation config and
    its tokenizer."""
    ends = set(eos_token_ids)
    if folder is None:
        return None, frozenset(ends)
    from tokenizers import Tokenizer

    generation_config = folder / "generation_config.json"
    if generation_config.is_file():
        eos = json.loads(generation_config.read_text()).get("eos_token_id")
        ends.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not found; the embedded engine needs it to stop at strings (rl360 model fetch)")
    tokenizer = Tokenizer.from_file(str(path))
    named = folder / "tokenizer_config.json"
    if named.is_file():
        eos = json.loads(named.read_text()).get("eos_token")
        eos_id = tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos) if eos else None
        ends.update([] if eos_id is None else [eos_id])
    return tokenizer, frozenset(ends)
