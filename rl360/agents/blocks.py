"""Fenced code blocks in a reply: the text protocols of models without tool calls.

In: a reply's text. Out: code. A fence is a line of three backticks; the closing one stands alone at the start of
a line. The time is linear in the text: the first fence that nothing closes ends the search, since nothing closes a
later one either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPENS = re.compile(r"^```[^\n`]*\n", re.MULTILINE)
_CLOSES = re.compile(r"^```[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    code: str


def _blocks(reply: str) -> Iterator[_Block]:
    end = 0
    while (opens := _OPENS.search(reply, end)) and (closes := _CLOSES.search(reply, opens.end())):
        end = closes.end()
        yield _Block(opens.start(), end, reply[opens.end() : closes.start()])


def extract_code(reply: str) -> tuple[str | None, bool]:
    """Return (code of the first closed block or None, whether the reply is exactly one block)."""
    block = next(_blocks(reply), None)
    if block is None:
        return None, False
    return block.code, not reply[: block.start].strip() and not reply[block.end :].strip()


def count_blocks(reply: str) -> int:
    """Number of closed blocks."""
    return sum(1 for _ in _blocks(reply))
