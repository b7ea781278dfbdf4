"""Fenced code blocks in a reply: the text protocols of models without tool calls.

In: a reply's text. Out: code. A fence is a line of three backticks; the closing one stands alone at the start of
a line.
"""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def extract_code(reply: str) -> tuple[str | None, bool]:
    """Return (code of the first closed block or None, whether the reply is exactly one block)."""
    match = _BLOCK.search(reply)
    if match is None:
        return None, False
    alone = not reply[: match.start()].strip() and not reply[match.end() :].strip()
    return match.group(1), alone


def count_blocks(reply: str) -> int:
    """Number of closed blocks."""
    return len(_BLOCK.findall(reply))
