"""Near names: turns a misspelt word into a suggestion. In: the word and what was allowed. Out: text for a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CLOSE_ENOUGH = 0.6  # difflib's ratio; below it a suggestion is more puzzling than none


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, else `; there are: A, B`, else an empty string when nothing is known."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1, cutoff=_CLOSE_ENOUGH)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are: {', '.join(names)}" if names else ""
