"""Which tries a list shows: read from the address, so that every list can be linked to.

In: a query string. Out: a `Filter` that says yes or no to a line, and its query again for links. Everything given must
hold. A reward bound leaves out tries without a reward, which are not zeros.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from rl360.viewer.source import Line, Source

SEARCH_BUDGET_S = 1.5  # of one request; a longer search goes on from where it stopped


class FilterError(ValueError):
    """A filter in the address that means nothing; the text is for the page."""


@dataclass(frozen=True, slots=True)
class Filter:
    """None: anything. `cause` is matched with the attempt's cause and with the outcome's reason."""

    purpose: str | None = None
    kind: str | None = None
    tag: str | None = None
    task: str | None = None
    stop: str | None = None
    cause: str | None = None
    success: str | None = None  # yes | no
    reward_min: float | None = None
    reward_max: float | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Filter:
        """Other keys are ignored. Raises FilterError."""
        given: dict[str, str | float] = {}
        for one in fields(cls):
            text = query.get(one.name, "").strip()
            if text and one.name.startswith("reward_"):
                given[one.name] = _number(one.name, text)
            elif text:
                given[one.name] = text
        if given.get("success", "yes") not in ("yes", "no"):
            raise FilterError(f"success: {given['success']!r}; expected yes or no")
        return cls(**given)  # type: ignore[arg-type]

    def query(self) -> dict[str, object]:
        """The part of an address that gives this filter again."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def accepts(self, line: Line, source: Source) -> bool:
        """Whether the list shows the line. Tags are looked up last: they may need a look into a row."""
        return (
            self.purpose in (None, line.purpose)
            and self.kind in (None, line.kind)
            and self.task in (None, line.task_id)
            and self.stop in (None, line.stop)
            and (self.cause is None or self.cause in (line.cause, line.reason))
            and (self.success is None or line.success is (self.success == "yes"))
            and self._accepts_reward(line.reward)
            and (self.tag is None or self.tag in source.tags(line))
        )

    def _accepts_reward(self, reward: float | None) -> bool:
        if self.reward_min is None and self.reward_max is None:
            return True
        if reward is None:
            return False
        low = -math.inf if self.reward_min is None else self.reward_min
        high = math.inf if self.reward_max is None else self.reward_max
        return low <= reward <= high


@dataclass(frozen=True, slots=True)
class Found:
    """A part of a search. `go_on_at` is the iteration and the position in it to continue from; None: all was seen."""

    lines: list[Line]
    go_on_at: tuple[int, int] | None
    enough: bool  # False: time ran out before `limit` lines were found


def search(source: Source, wanted: Filter, start: tuple[int, int], limit: int) -> Found:
    """The first `limit` tries that the filter accepts from a place on, over all iterations, in order."""
    deadline = time.monotonic() + SEARCH_BUDGET_S
    found: list[Line] = []
    for iteration in source.iterations():
        if iteration < start[0]:
            continue
        if time.monotonic() > deadline:
            return Found(found, (iteration, 0), enough=False)
        first = start[1] if iteration == start[0] else 0
        for position, line in enumerate(source.lines(iteration)[first:], first):
            if not wanted.accepts(line, source):
                continue
            if len(found) == limit:
                return Found(found, (iteration, position), enough=True)
            found.append(line)
    return Found(found, None, enough=True)


def neighbours(source: Source, wanted: Filter, iteration: int, try_id: str) -> tuple[Line | None, Line | None]:
    """The accepted tries before and after one, which need not be accepted itself; other iterations when it is at an
    edge of its own."""
    lines = source.lines(iteration)
    at = next((i for i, line in enumerate(lines) if line.try_id == try_id), None)
    if at is None:
        return None, None
    deadline = time.monotonic() + SEARCH_BUDGET_S
    iterations = source.iterations()
    earlier = (source.lines(i)[::-1] for i in _until(deadline, reversed([i for i in iterations if i < iteration])))
    later = (source.lines(i) for i in _until(deadline, [i for i in iterations if i > iteration]))
    return (
        _first(source, wanted, [lines[:at][::-1]], earlier),
        _first(source, wanted, [lines[at + 1 :]], later),
    )


def _first(source: Source, wanted: Filter, *parts: Iterable[Sequence[Line]]) -> Line | None:
    for part in parts:
        for lines in part:
            for line in lines:
                if wanted.accepts(line, source):
                    return line
    return None


def _until(deadline: float, iterations: Iterable[int]) -> Iterator[int]:
    for iteration in iterations:
        if time.monotonic() > deadline:
            return
        yield iteration


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise FilterError(f"{name}: {text!r} is not a number")
    return value
