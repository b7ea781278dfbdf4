"""Stops in a text that grows: found with the token that completes them, and looked for at its end only."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.gateway.embedded.sampling import SamplingParams
from rl360.gateway.embedded.stops import StopWatch, _Pattern
from rl360.gateway.generation import CODE_BLOCK_REGEX


class Pieces:
    """A tokenizer whose ids are numbers of pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids)


def stopped_after(pieces: list[str], **params: Any) -> tuple[int, str] | None:
    """(pieces it took, what matched)."""
    watch = StopWatch(Pieces(pieces), SamplingParams.from_json(params))
    for count in range(1, len(pieces) + 1):
        if (matched := watch.add(list(range(count)))) is not None:
            return count, matched
    return None


PATTERNS = [
    CODE_BLOCK_REGEX,  # no longest match, ends with three backquotes
    "ab+c",
    "a{2,3}$",
    r"^b",
    r"b\B",
    r"(?<=a)b`",
    r"a(?=bc)",  # looks ahead: what comes later makes a match of what was there
    r"(?i)AB`",
    r"(a|bc)\1",
    r"a[^`]*`\n",
    r"\Bb",
    "(?:)c",
]


@given(
    pieces=st.lists(st.text(alphabet="abc`\n", min_size=1, max_size=4), max_size=30), pattern=st.sampled_from(PATTERNS)
)
def test_a_pattern_is_found_when_the_whole_text_has_it(pieces: list[str], pattern: str) -> None:
    whole = [n for n in range(1, len(pieces) + 1) if re.search(pattern, "".join(pieces[:n]))]
    assert stopped_after(pieces, stop_regex=[pattern]) == ((whole[0], pattern) if whole else None)


@given(pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=30))
def test_a_string_is_found_across_tokens(pieces: list[str]) -> None:
    whole = [n for n in range(1, len(pieces) + 1) if "abba" in "".join(pieces[:n])]
    assert stopped_after(pieces, stop=["abba"]) == ((whole[0], "abba") if whole else None)


class Counted:
    """A compiled pattern that adds up the characters it is asked to look through."""

    def __init__(self, compiled: re.Pattern[str]) -> None:
        self.compiled, self.looked_through = compiled, 0

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        self.looked_through += len(text) - start
        return self.compiled.search(text, start)


@pytest.mark.parametrize(("pattern", "most"), [(CODE_BLOCK_REGEX, 2 * 15_000), ("END[0-9]{3}", 5000 * 9)])
def test_a_long_text_is_not_searched_whole_for_each_token(pattern: str, most: int) -> None:
    """5000 tokens of three characters, two of them a fence that opens: by the square that would be 37 million."""
    watched = _Pattern(pattern)
    counted = watched.compiled = Counted(watched.compiled)  # type: ignore[assignment]
    text = ""
    for number in range(5000):
        known, piece = len(text), "```" if number in (100, 101) else "abc"
        text += piece
        assert not watched.matches(text, known)
    assert isinstance(counted, Counted)
    assert counted.looked_through <= most
