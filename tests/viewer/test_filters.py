"""Which tries a filter lets through, and the way to the next one."""

from __future__ import annotations

import pytest

from rl360.viewer import filters
from rl360.viewer.filters import Filter, FilterError, neighbours, search
from rl360.viewer.source import Source
from tests.viewer.runs import write_run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    return Source(write_run(tmp_path_factory.mktemp("run")))


def ids(source: Source, **query: str) -> list[str]:
    return [line.try_id for line in search(source, Filter.from_query(query), (0, 0), 100).lines]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"tag": "tools"}, ["i0-b-0.t0", "i0-b-1.t0"]),
        ({"tag": "easy", "purpose": "eval"}, ["e0-a-0.t0"]),
        ({"task": "task-b"}, ["i0-b-0.t0", "i0-b-1.t0"]),
        ({"reward_min": "0.25", "reward_max": "0.5"}, ["i0-a-2.t0", "e0-a-0.t0"]),
        ({"reward_max": "0"}, ["i0-a-0.t0"]),  # masked ones have no reward
        ({"cause": "sandbox_died"}, ["i0-a-3.t1"]),
        ({"cause": "worker_died"}, ["i0-a-3.t0"]),
        ({"cause": "equal_rewards"}, ["i0-b-0.t0", "i0-b-1.t0"]),
        ({"kind": "open"}, ["i1-a-1.t0", "i1-a-2.t0"]),
        ({"stop": "turns"}, ["i1-a-0.t0"]),
        ({"success": "no"}, ["i0-a-0.t0", "i0-a-2.t0", "e0-a-0.t0", "i1-a-1.t0"]),
        ({"tag": "no such"}, []),
        ({"tag": "  ", "other": "x", "kind": "stale"}, []),
    ],
)
def test_filters(source, query, expected):
    assert ids(source, **query) == expected


def test_a_filter_and_its_query_are_the_same():
    wanted = Filter.from_query({"tag": "a b", "reward_min": "-1e3", "success": "yes", "page": "3"})
    assert wanted.query() == {"tag": "a b", "reward_min": -1000.0, "success": "yes"}
    assert Filter.from_query({k: str(v) for k, v in wanted.query().items()}) == wanted
    assert Filter.from_query({}).query() == {}


@pytest.mark.parametrize("query", [{"reward_min": "x"}, {"reward_max": "nan"}, {"success": "maybe"}])
def test_what_means_nothing_is_said(query):
    (name,) = query
    with pytest.raises(FilterError, match=name):
        Filter.from_query(query)


def test_a_search_goes_on_where_it_stopped(source):
    everything = ids(source)
    assert len(everything) == 11
    parts, at = [], (0, 0)
    while at is not None:
        found = search(source, Filter(), at, 4)
        parts += [line.try_id for line in found.lines]
        at = found.go_on_at
    assert parts == everything


def test_a_search_that_takes_too_long_says_where_it_stopped(source, monkeypatch):
    monkeypatch.setattr(filters, "SEARCH_BUDGET_S", -1.0)
    found = search(source, Filter(), (1, 0), 4)
    assert (found.lines, found.go_on_at, found.enough) == ([], (1, 0), False)


def test_neighbours_stay_in_the_filter_and_cross_iterations(source):
    def around(try_id: str, iteration: int = 0, **query: str) -> tuple[str | None, ...]:
        found = neighbours(source, Filter.from_query(query), iteration, try_id)
        return tuple(line and line.try_id for line in found)

    assert around("i0-a-0.t0") == (None, "i0-a-1.t0")
    assert around("e0-a-0.t0") == ("i0-b-1.t0", "i1-a-0.t0")
    assert around("i1-a-0.t0", 1) == ("e0-a-0.t0", "i1-a-1.t0")
    assert around("i1-a-2.t0", 1) == ("i1-a-1.t0", None)
    assert around("i0-a-1.t0", success="yes") == (None, "i0-b-0.t0")
    assert around("i0-a-0.t0", success="yes") == (None, "i0-a-1.t0")  # not in the list itself
    assert around("i0-b-1.t0", kind="open") == (None, "i1-a-1.t0")
    assert around("no such") == (None, None)
