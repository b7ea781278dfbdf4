"""Which parts of an engine's memory somebody else has, under SGLang's tags: what is allowed then, and what is not.

In: tags to give up and to take again. Out: what changed, or a ValueError whose text is for the client. The memory
itself is left to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

KV_CACHE, WEIGHTS = "kv_cache", "weights"
MEMORY_TAGS = (KV_CACHE, WEIGHTS)


class Memory:
    """All of it is there at first. Tags None: both."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()

    def release(self, tags: Sequence[str] | None) -> frozenset[str]:
        """Returns what is given up. Raises ValueError for what was released already."""
        wanted = _checked(tags)
        if again := wanted & self.released:
            raise ValueError(f"released already: {_listed(again)}")
        self.released |= wanted
        return wanted

    def resume(self, tags: Sequence[str] | None) -> None:
        """Raises ValueError for what was not released."""
        wanted = _checked(tags)
        if missing := wanted - self.released:
            raise ValueError(f"not released: {_listed(missing)}")
        self.released -= wanted

    def need_all(self) -> None:
        """Before anything computes."""
        if self.released:
            raise ValueError(f"The engine has released its memory: {_listed(self.released)}.")

    def need_weights(self) -> None:
        """Before weights are read or written."""
        if WEIGHTS in self.released:
            raise ValueError("The memory of the weights is released.")


def _checked(tags: Sequence[str] | None) -> frozenset[str]:
    wanted = frozenset(MEMORY_TAGS if tags is None else tags)
    if unknown := wanted - set(MEMORY_TAGS):
        raise ValueError(f"unknown tags {', '.join(sorted(unknown))}; expected some of {', '.join(MEMORY_TAGS)}")
    return wanted


def _listed(tags: frozenset[str]) -> str:
    return ", ".join(sorted(tags))
