"""Prompt ids with their JSON text, which a session's next prompt mostly shares.

In: a session's prompts, one after the other. Out: `PromptIds`, a sequence of ints that also is its own JSON. Left to
others: where prompts come from (tokens.py), requests (engine_client.py).

A history of 40,000 tokens is sent whole with every turn, and turning ints into text was half of the proxy's time for
one (measured: 4.5 of 10 ms). Only what was not in the prompt before is turned into text here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload


class PromptIds(Sequence[int]):
    """Token ids, and the same as the inside of a JSON list: `1,2,3`."""

    __slots__ = ("_ids", "json")

    def __init__(self, ids: array[int], json: bytes) -> None:
        self._ids = ids
        self.json = json

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._ids[index]


class IdText:
    """The last prompt of one session."""

    def __init__(self) -> None:
        self._ids: array[int] = array("i")
        self._json = b""

    def of(self, ids: array[int]) -> PromptIds:
        """The ids with their JSON. Those that the last prompt began with are not turned into text again."""
        known = len(self._ids)
        if ids[:known] != self._ids:
            known, self._json = 0, b""
        if len(ids) > known:
            new = ",".join(map(str, ids[known:])).encode()
            self._json = self._json + b"," + new if known else new
        self._ids = ids
        return PromptIds(ids, self._json)
