"""When generated text ends a request: stop strings and regular expressions, also across token boundaries.

In: a model folder's tokenizer; the sampled ids of one request, one at a time. Out: the ids that end a text, whether a
stop matched, and the final text. Acting on end tokens and length caps is left to the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from rl360.errors import ConfigError
from rl360.gateway.embedded.sampling import SamplingParams

# What a decoder puts where bytes do not form a whole character yet.
INCOMPLETE = "\ufffd"


class Decodes(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class StopWatch:
    """Watches the text of one request grow.

    Only the last few ids are decoded again for each token: decoding is not a concatenation, so a settled id before the
    new ones gives them their context (its text is subtracted).
    """

    def __init__(self, tokenizer: Decodes, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._strings = params.stop
        self._patterns = [(pattern, re.compile(pattern)) for pattern in params.stop_regex]
        self._longest = max((len(s) for s in self._strings), default=0)
        self._text = ""  # of whole characters so far
        self._context = 0  # ids [context, settled) are decoded only as context
        self._settled = 0
        self._context_text = ""

    def add(self, output_ids: list[int]) -> str | None:
        """Look at the text after a new last id. Returns the string or the pattern that matched, else None."""
        window = self._tokenizer.decode(output_ids[self._context :], skip_special_tokens=False)
        fresh = window[len(self._context_text) :]
        text = self._text + fresh
        searched_from = max(0, len(self._text) - self._longest)
        if not fresh.endswith(INCOMPLETE):
            self._context, self._settled = self._settled, len(output_ids)
            self._context_text = self._tokenizer.decode(output_ids[self._context :], skip_special_tokens=False)
            self._text = text
        for string in self._strings:
            if text.find(string, searched_from) >= 0:
                return string
        for pattern, compiled in self._patterns:
            if compiled.search(text):
                return pattern
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
