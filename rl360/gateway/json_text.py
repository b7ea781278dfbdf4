"""JSON that the policy wrote: it may be anything, and reading it must never be more than a ValueError.

In: text. Out: its value. Left to others: what the value means.
"""

from __future__ import annotations

import json
from typing import Any

# Whatever handles a value after us (digests, templates, agents, their clients) recurses into it too.
MAX_DEPTH = 100


class TooDeep(ValueError):
    """Nested deeper than MAX_DEPTH."""


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: not JSON, or TooDeep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooDeep(f"nested deeper than {MAX_DEPTH}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for one in level if isinstance(one, dict | list) for part in _parts(one)]
        if not level:
            return
    raise TooDeep(f"nested deeper than {MAX_DEPTH}")


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
